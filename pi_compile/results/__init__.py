"""Results of the stages, as records that are saved and loaded."""
