"""A recipe carried out: the stages in order, their results on disk, and the lock of a placement."""
