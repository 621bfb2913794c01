"""The commands that talk to a daemon, against a real one."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.service.caches import LARGE, SPACE, prompt, small, tensor_of
from tests.service.client.daemons import Process, own_process
from tests.service.runners.tiny import tiny_llama
from tiercache.config import Config
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import cli_client, cli_model, runners
from tiercache.service.cli_text import _reasons, share, span, tree_view
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.commands import app
from tiercache.service.runners.model import Loaded
from tiercache.spec import Namespace

AT_ONCE = BackOff(first=0.01, most=0.05)


def tiercache(*words: str, input: str | None = None) -> Result:
    """Run the command line at 80 columns."""
    return CliRunner().invoke(app, words, input=input, env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.fixture
def daemon() -> Iterator[Process]:
    """A daemon with four blocks, of which two were found once and one was not."""
    with own_process(small(hbm=8, dram=16, ssd=None, spec=LARGE)) as running:
        with BlockingClient(running.address, deadline=30.0, back_off=AT_ONCE) as client:
            client.connected()
            kv = client.open(SPACE, LARGE)
            tokens = prompt(1, 4)
            kv.insert(tokens, tensor_of(tokens, spec=LARGE))
            with kv.match([*prompt(1, 2), *prompt(9, 1)]):
                pass
        yield running


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The path of a socket that is not there."""
    with tempfile.TemporaryDirectory(prefix="tc") as folder:
        yield f"{folder}/s"


def test_what_there_is_is_shown(daemon: Process) -> None:
    """Statistics, tree, live view and audit fit in 80 columns and say what the daemon holds."""
    for words, said in {
        ("stats",): ["serving", "HBM", "1 match: 2 of 3 blocks found"],
        ("tree",): ["m  ", "4 blocks", "└─ [HBM]"],
        ("top", "--once"): ["rates since the daemon began", "HBM", "hit rate"],
        ("top",): ["hit rate"],
        ("check",): ["The books are right", "4 blocks"],
    }.items():
        done = tiercache(*words, "--socket", daemon.address)

        assert done.exit_code == 0, done.output
        assert [text for text in said if text not in done.stdout] == []
        assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_what_ails_a_daemon_is_shown(tmp_path: Path) -> None:
    """Statistics and live view say degraded, the code, since when, and the whole text, in 80 columns."""
    (tmp_path / "kv" / "metadata").mkdir(parents=True)
    (tmp_path / "kv" / "format.json").write_text('{"format": 1}')
    (tmp_path / "kv" / "metadata" / "data.mdb").write_bytes(b"\xa5" * 65536)
    with own_process(small(hbm=8, ssd=64, spec=LARGE, directory=tmp_path / "kv")) as running:
        with BlockingClient(running.address, deadline=30.0, back_off=AT_ONCE) as client:
            client.connected()
        for words in (["stats"], ["top", "--once"]):
            done = tiercache(*words, "--socket", running.address)

            assert done.exit_code == 0, done.output
            shown = done.stdout
            assert "now, degraded" in shown and "data_set_aside" in shown and "00:00:0" in shown
            folded = "".join(shown.split())
            assert f"weremovedto{tmp_path}/kv/set-aside-1,andSSDbeganwithoutthem" in folded
            assert max(len(line) for line in shown.splitlines()) <= 80
            if words == ["stats"]:
                assert "longest call" in shown and " free, 0 s ago" in shown


def test_a_message_with_brackets_is_shown_as_it_is() -> None:
    """What the system says is no markup."""
    reasons = [{"code": "disk_failing", "message": f"{number} [Errno 5] [red]x[/]", "since_seconds": 3.0} for number in range(9)]
    out = Console(width=80, record=True, file=io.StringIO())

    for part in _reasons({"status": "degraded", "reasons": reasons}, most=6):
        out.print(part)

    text = out.export_text()
    assert text.count("[Errno 5] [red]x[/]") == 6 and "… and 3 more: tiercache stats" in text


def test_programs_get_json(daemon: Process) -> None:
    """With --json the daemon's answers come as they are."""
    found = {word: json.loads(tiercache(word, "--json", "--socket", daemon.address).stdout) for word in ("stats", "tree", "check")}

    assert found["stats"]["stacks"][0]["blocks"] == 4
    assert "[HBM]" in found["tree"]["trees"][0]["tree"]
    assert (found["check"]["faults"], found["check"]["counts"]["blocks"]) == ([], 4)


def test_clear_asks_first(daemon: Process) -> None:
    """Without a yes nothing is removed; with one everything is."""
    refused = tiercache("clear", "--socket", daemon.address, input="n\n")
    wrong = tiercache("clear", "--yes", "--namespace", "zz", "--socket", daemon.address)
    done = tiercache("clear", "--yes", "--socket", daemon.address)

    assert (refused.exit_code, wrong.exit_code, done.exit_code) == (1, 2, 0)
    assert "no namespace" in wrong.stderr
    assert done.stdout == "4 blocks removed\n"


def test_clear_takes_what_is_named(daemon: Process) -> None:
    """What would go is said before it is asked; an adapter, none of it, a tenant, and a salt that no process list shows."""
    spaces = [Namespace(model="m", weights="sha256:1", adapter="a@1"), Namespace(model="m", weights="sha256:1", salt="secret")]
    tokens = prompt(1, 2)
    with BlockingClient(daemon.address, deadline=30.0, back_off=AT_ONCE) as client:
        client.connected()
        for space in spaces:
            client.open(space, LARGE).insert(tokens, tensor_of(tokens, space=space, spec=LARGE))

        def clear(*words: str, input: str | None = None) -> Result:
            return tiercache("clear", *words, "--socket", daemon.address, input=input)

        nobody = clear("--adapter", "a@2")
        refused = clear("--model", "m", "--no-adapter", input="n\n")
        both = clear("--adapter", "a@1", "--no-adapter")
        held = client.check()["blocks"]
        adapter = clear("--adapter", "a@1", "--yes")
        tenant = clear("--salt", "-", input="secret\ny\n")
        rest = clear("--model", "m", "--weights", "sha256:1", "--no-adapter", "--no-salt", "--yes")

    assert (nobody.exit_code, nobody.stdout) == (0, "Nothing is held there.\n")
    assert (refused.exit_code, both.exit_code, held) == (1, 2, 8)
    assert "Remove 6 blocks from all tiers?" in refused.stdout and "salted" in refused.stdout and "secret" not in refused.stdout
    assert (adapter.stdout, rest.stdout) == ("2 blocks removed\n", "4 blocks removed\n")
    assert tenant.stdout.endswith("2 blocks removed\n")
    assert max(len(line) for line in refused.stdout.splitlines()) <= 80


def test_faults_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault of the books is a line."""
    monkeypatch.setattr(cli_client, "with_daemon", lambda *_: {"counts": {}, "faults": ["slot 3 is held twice"]})

    done = tiercache("check")

    assert done.exit_code == 1
    assert "1 fault:\n  slot 3 is held twice" in done.stdout


@pytest.mark.parametrize("words", [["stats"], ["tree"], ["top", "--once"], ["top"], ["check"], ["clear", "--yes"]])
def test_no_daemon_is_one_line_and_status_2(words: list[str], nowhere: str) -> None:
    """Every command that needs a daemon names the socket where none is."""
    done = tiercache(*words, "--socket", nowhere)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"tiercache: no daemon at {nowhere}: No such file or directory\n"


@pytest.mark.parametrize("words", [["stats"], ["tree"], ["top", "--once"], ["check"], ["clear"], ["clear", "--yes"]])
def test_an_answer_of_something_else_is_one_line_and_status_2(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's JSON, or a daemon's of another version: no traceback."""

    async def ask(asker: cli_client.Asker, target: str, **options: Any) -> Any:
        return {"hello": [1], "trees": 3, "faults": 7, "namespaces": 5}

    monkeypatch.setattr(cli_client.Asker, "ask", ask)

    result = tiercache(*words, "--socket", "/nowhere")

    assert result.exit_code == 2 and result.stderr.startswith("tiercache: the answer at the socket is none")
    assert result.stderr.count("\n") == 1


def test_a_socket_that_cannot_be_is_one_line() -> None:
    """A path longer than an address holds is refused before anything is asked."""
    done = tiercache("stats", "--socket", "/" + "x" * 200)

    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1 and "bytes long" in done.stderr


def test_config_says_where_each_value_came_from(tmp_path: Path) -> None:
    """Flags stand above the file, and the file above defaults, in limits too."""
    file = tmp_path / "c.toml"
    file.write_text('admit_ms = 7\ncodec = "zstd"\ntiers = [{tier = "DRAM", capacity = "1 MiB"}]\n[limits]\nleases = 9\n')

    found = json.loads(tiercache("config", "-c", str(file), "--hbm", "2MiB", "--socket", "/tmp/s", "--json").stdout)
    shown = tiercache("config", "-c", str(file))

    assert found["admit_ms"] == {"value": 7, "from": "file"}
    assert found["tiers"] == {"value": [{"tier": "HBM", "capacity": "2MiB"}], "from": "flag"}
    assert found["socket"] == {"value": "/tmp/s", "from": "flag"}
    assert (found["limits.leases"]["from"], found["limits.requests"]["from"]) == ("file", "default")
    assert shown.exit_code == 0 and "DRAM 1 MiB" in shown.stdout


def test_a_configuration_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """The key that does not exist is named."""
    file = tmp_path / "c.toml"
    file.write_text("nonsense = 1\n")

    done = tiercache("config", "-c", str(file))

    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1 and "nonsense" in done.stderr


def test_a_deep_tree_stays_legible() -> None:
    """Of a branch too deep for the terminal the tier and the depth are still shown."""
    line = "   " * 40 + "└─ [SSD] (+DRAM) 12 blocks  leased"

    view = tree_view([{"namespace": "ab" * 32, "tree": f"root\n{line}"}], {}, 80)

    drawn = str(view.renderables[2])
    assert len(drawn) <= 80
    assert drawn.startswith("… 41") and drawn.endswith("└─ [SSD] (+DRAM) 12 blocks  leased")


def test_numbers_as_people_read_them() -> None:
    """Nothing asked for has no rate, and days stand apart."""
    assert (share(1, 4), share(0, 0)) == ("25 %", "·")
    assert (span(3_725), span(90_000)) == ("01:02:05", "1 d 01:00:00")


class Words:
    """A tokenizer of bytes with a chat template of sorts."""

    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 96 for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("A") + token % 26) for token in tokens)

    def apply_chat_template(
        self, turns: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool = True, return_dict: bool = False
    ) -> Any:
        text = "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"
        return self.encode(text, add_special_tokens=False) if tokenize else text


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged model is a tiny one with random weights."""
    loaded = Loaded(tiny_llama(layers=2), Words(), Namespace(model="tiny", weights="sha256:none"))
    monkeypatch.setattr(runners, "load_model", lambda *_, **__: loaded, raising=False)


ASKED = "what is kept of a prompt that was said before, word for word?"


@pytest.mark.usefixtures("tiny")
def test_an_answer_says_where_its_prefix_was_found() -> None:
    """The second time the prompt's whole blocks come from the cache, and the answer is the same."""
    with own_process(Config.of(hbm="1 MiB", dram="1 MiB")) as running:
        with BlockingClient(running.address, back_off=AT_ONCE) as client:
            client.connected()
        first, second = (tiercache("generate", ASKED, "--tokens", "3", "--socket", running.address) for _ in range(2))
        talk = tiercache("chat", "--tokens", "3", "--socket", running.address, input=f"{ASKED}\n\nand then?\n/quit\n")

    size = len("<user>" + ASKED + "<assistant>")
    assert first.exit_code == second.exit_code == talk.exit_code == 0, first.output + talk.output
    assert f"HBM 0, DRAM 0, SSD 0, computed {size};" in first.stderr
    assert f"HBM {size // 16 * 16}, DRAM 0, SSD 0, computed {size % 16};" in second.stderr
    assert first.stdout == second.stdout and len(first.stdout) == 4
    assert talk.stdout.startswith(first.stdout) and talk.stderr.count("prefix: HBM 64") >= 1


@pytest.mark.usefixtures("tiny")
def test_without_a_daemon_a_model_answers_all_the_same(nowhere: str) -> None:
    """It is said once that there is none, and everything is computed."""
    done = tiercache("chat", "--tokens", "3", "--socket", nowhere, input="one\ntwo\n")

    assert done.exit_code == 0
    assert done.stderr.count("No daemon at") == 1
    assert done.stderr.count("HBM 0, DRAM 0, SSD 0, computed") == 2


@pytest.mark.usefixtures("tiny")
def test_how_long_to_wait_is_said_once(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--prefetch` is the policy that the client is made with; one that can't be is one line, before the model is loaded."""
    asked: list[object] = []

    def listen(address: str, *, prefetch: object) -> Client:
        asked.append(prefetch)
        return connect(address)

    monkeypatch.setattr(cli_model, "connect", listen)

    for words in ([], ["--prefetch", "best-effort"], ["--prefetch", "0.2"]):
        assert tiercache("generate", "one", "--tokens", "1", "--socket", nowhere, *words).exit_code == 0
    monkeypatch.setattr(runners, "load_model", None)
    refused = tiercache("generate", "one", "--socket", nowhere, "--prefetch", "soon")

    assert asked == [PrefetchPolicy(None), PrefetchPolicy(0.0), PrefetchPolicy(0.2)]
    assert refused.exit_code == 2 and "prefetch must be 'wait', 'best-effort' or a number" in refused.stderr


@pytest.mark.usefixtures("tiny")
def test_a_chat_that_grows_too_long_is_one_line(nowhere: str) -> None:
    """What the model can't take is said, not computed."""
    done = tiercache("generate", "x" * 600, "--socket", nowhere)

    assert done.exit_code == 2
    assert "more than the 512 that this model takes" in done.stderr
