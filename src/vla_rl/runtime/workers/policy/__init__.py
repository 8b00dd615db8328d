"""Policies: acting, and the samples that acting makes."""
