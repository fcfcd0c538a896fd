"""What is wrong with a kernel that ran. No error a user sees: tests expect these, or fail by them."""


class PtxError(Exception):
    """A kernel did what it must not do."""


class UnknownInstructionError(PtxError):
    """An instruction, or a form of one, that the emulator does not know."""


class OutsideError(PtxError):
    """An address outside its tensor or outside shared memory, or one that is not aligned."""


class UnwrittenError(PtxError):
    """A read of what nothing wrote: a register, shared memory, or global memory that was only allocated."""


class PendingError(PtxError):
    """Shared memory was used before a wait for the asynchronous copy into it."""


class RaceError(PtxError):
    """Two threads used one place, one of them to write, and nothing orders them."""


class BarrierError(PtxError):
    """Threads of a program, or lanes of a warp, do not meet where they must."""
