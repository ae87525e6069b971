"""The runtime's events."""

from dbuffer.events import listen, listeners, tell


def test_every_listener_hears_everything_until_its_block_ends() -> None:
    first: list[tuple[str, object]] = []
    second: list[tuple[str, object]] = []
    with listen(lambda *event: first.append(event)), listen(lambda *event: second.append(event)):
        tell("gather", 1)
    tell("gather", 2)
    assert first == second == [("gather", 1)]
    assert listeners == []
