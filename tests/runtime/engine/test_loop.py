"""A step that goes on is well however long it takes; one that stands still is not."""

from pi_runtime.engine.loop import StepWatch


class World:
    """A clock and a count of work."""

    now = 100.0
    count = 7


def watched() -> tuple[World, StepWatch]:
    world = World()
    return world, StepWatch(lambda: world.count, lambda: world.now)


def test_between_steps_nothing_stalls() -> None:
    world, watch = watched()
    world.now += 1000
    assert watch.stalled_s == 0
    watch.begin()
    watch.end()
    world.now += 1000
    assert watch.stalled_s == 0


def test_a_step_stalls_from_its_beginning_or_its_latest_progress_on() -> None:
    world, watch = watched()
    world.now += 1000
    watch.begin()
    world.now += 5
    assert watch.stalled_s == 5
    world.count += 1
    assert watch.stalled_s == 0
    world.now += 3
    assert watch.stalled_s == 3
    watch.end()
    watch.begin()
    world.now += 2
    assert watch.stalled_s == 2


def test_a_long_step_that_goes_on_never_stalls() -> None:
    world, watch = watched()
    watch.begin()
    for _ in range(100):
        world.now, world.count = world.now + 50, world.count + 1
        assert watch.stalled_s == 0
