"""The profile of this machine: measured once, briefly, and kept in the user's cache folder."""

from collections.abc import Callable

from pi_compile.errors import ProfileError
from pi_compile.files import write_text
from pi_compile.machine.doctor import installed_ram, usable_cores
from pi_compile.machine.profile import Machine, read_machine
from pi_runtime.errors import Setting, UsageError
from pi_runtime.execution.devices import processor_name
from pi_runtime.files import user_cache


def this_machine(notice: Callable[[str], None]) -> Machine:
    """The kept profile of this machine; where there is none, or it is of another machine, it is measured and kept.

    Its disk is that of the cache folder. Raises UsageError where nothing can be kept.
    """
    try:
        path = user_cache() / "machine.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise UsageError(
            "no folder for this machine's profile",
            found=error,
            remedy=("PI_CACHE_DIR=FOLDER; or ", Setting("machine", "laptop"), ", one of those in profiles/machines"),
        ) from None
    try:
        kept = read_machine(path)
    except ProfileError:  # none yet, or of another version
        kept = None
    here = (processor_name(), usable_cores(), round((installed_ram() or 8 << 30) / 2**30, 1))
    if kept is not None and (kept.cpu.name, kept.cpu.cores, kept.cpu.ram_gib) == here:
        return kept
    from pi_compile.machine.measurement import measure_machine  # noqa: PLC0415  kernels, seconds to import

    notice(f"measuring this machine, once, some 15 s; minutes where kernels are to be compiled first: {path}")
    found = measure_machine(path.parent, notice, briefly=True)
    write_text(path, found.to_toml())
    return found
