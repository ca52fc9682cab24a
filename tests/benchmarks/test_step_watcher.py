"""Who reads an engine's records while it serves."""

from benchmarks.step_watcher import StepWatcher
from engine.messages import Generate
from tests.support.engine_server import server_thread
from tests.support.scripted_engine import EOS, ScriptedRunner, request


def test_a_watcher_collects_what_is_recorded_from_when_it_begins_and_nothing_before():
    with server_thread(ScriptedRunner(lambda prompt, adapter: [7, EOS])) as server:
        client = server.joined_client()
        watchers = []
        for number, length in enumerate((1, 2, 3)):
            watcher = StepWatcher(server.socket_path)
            client.send(Generate(request(number, [1] * length)))
            client.receive_last(number)
            watcher.close()
            watchers.append(watcher)
    assert [[r.prompt_tokens for r in w.requests] for w in watchers] == [[1], [2], [3]]
    numbers = [step.number for watcher in watchers for step in watcher.steps]
    assert numbers == sorted(set(numbers)) and all(watcher.steps for watcher in watchers)
    assert not any(watcher.num_missed for watcher in watchers)
