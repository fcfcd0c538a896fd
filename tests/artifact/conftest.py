"""Property tests here repeat: same cases every time, and no clock."""

from hypothesis import settings

settings.register_profile("artifact", deadline=None, derandomize=True)
settings.load_profile("artifact")
