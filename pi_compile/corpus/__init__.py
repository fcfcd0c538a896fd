"""Text as three disjoint token streams: to fit on, to tune on, to report on."""
