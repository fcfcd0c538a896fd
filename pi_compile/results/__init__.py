"""What the stages make, as records that are saved and loaded."""
