"""A placement explained on one page, in words, figures and tables."""
