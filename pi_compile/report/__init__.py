"""A placement explained on one page with figures."""
