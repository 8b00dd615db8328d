"""Types that cross process boundaries: plain data with little behaviour."""
