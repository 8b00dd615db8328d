"""Types that cross process boundaries."""
