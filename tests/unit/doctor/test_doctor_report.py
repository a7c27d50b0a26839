"""Findings as text, JSON and a block for an issue."""

import json

from lockstep.doctor.finding import Report, note, ok, problem

FOUND = (
    ok("GPUs", what="none", command="never shown"),
    note("memory", what="little on node7", why="it is \x1b[31mfull", command="free -h"),
    problem("ports", what="closed", command="open them"),
)
REPORT = Report(
    "machine",
    "2 ranks on 1 node",
    FOUND,
    variables={"NCCL_DEBUG": "INFO", "FI_PROVIDER_TOKEN": "xyz", "TORCH_HOME": "/home/ann/t"},
    private={"/home/ann": "~", "node7": "node-0", "ann": "USER"},
)


def test_text_is_harmless_and_says_what_was_tested():
    text = REPORT.text()
    assert "\x1b" not in text
    assert "never shown" not in text
    assert text.splitlines()[-1] == "1 problem, 1 note; really tested: 2 ranks on 1 node"
    assert "do:  free -h" in text
    assert "why: it is" in text


def test_json_has_each_finding_and_the_exit_code():
    shown = json.loads(REPORT.to_json())
    assert shown["exit_code"] == REPORT.exit_code == 3
    assert [finding["level"] for finding in shown["findings"]] == ["ok", "note", "problem"]
    assert shown["tested"] == "2 ranks on 1 node"


def test_an_issue_has_no_secrets_and_no_names():
    issue = REPORT.issue()
    assert issue.startswith("```text\n")
    assert issue.endswith("\n```")
    for private in ("xyz", "node7", "/home/ann", "\x1b"):
        assert private not in issue
    assert "NCCL_DEBUG=INFO" in issue
    assert "TORCH_HOME=~/t" in issue
    assert "little on node-0" in issue
    assert "channel" in Report("a channel", "", (), private={"ann": "USER"}).issue(), "a part of a word is no name"


def test_nothing_wrong():
    assert Report("machine", "1 rank", (ok("GPUs", what="none"),)).exit_code == 0
    assert Report("machine", "1 rank", ()).text().strip() == "nothing found; really tested: 1 rank"
