"""Data sets of one's own: answers, labels, balance, and going on after a kill."""

import dataclasses
import functools
import json

import pytest
import typer.testing

from chat_server import STALL, serving
from jaxhal.cli import app as cli
from jaxhal.datasets import Question, from_jsonl, questions_from
from jaxhal.datasets.published import REFUSAL
from jaxhal.experiments import making
from jaxhal.experiments.making import Making, make
from jaxhal.generation import Generated
from jaxhal.llm.endpoint import Endpoint
from jaxhal.llm.judges import Verdict
from tiny_lm import tiny_lm

QUESTIONS = [
    Question(f"Which number is {n}?", (str(n), f"number {n}"), id=f"q{n}", context="0")
    for n in range(12)
]


def answer(number: int) -> str:
    """Right, wrong, neither, empty, by turns."""
    return [f"{number}.", "no idea at all", f"it is {number} here", ""][number % 4]


@pytest.fixture
def world(monkeypatch):
    """Questions, and a model whose answers are known; what it was asked."""
    asked = []

    def generate(lm, prompts, *, key, stop, **options):
        asked.extend(prompts)
        assert len(key) == len(prompts)
        numbers = [
            int(prompt.split("number is ")[1].split("?")[0]) for prompt in prompts
        ]
        return [
            [
                Generated(
                    text=answer(n),
                    tokens=making.np.arange(3),
                    logprobs=making.np.full(3, -1.0),
                    stopped="length" if n == 9 else "eos",
                    features={},
                )
            ]
            for n in numbers
        ]

    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: QUESTIONS)
    monkeypatch.setattr(making, "model", lambda name, *_, **__: tiny_lm())
    monkeypatch.setattr(making, "generate", generate)
    return asked


def config(tmp_path, **changes):
    base = {"name": "own", "questions": "numbers", "out": str(tmp_path)}
    return base | {"batch_size": 5, "prompt": "{context}: {question}"} | changes


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_answers_are_judged_and_balanced(world, tmp_path):
    made = make(config(tmp_path), progress=False)
    # 0, 4, 8 are right, 1, 5 wrong (9 was cut off), 2, 6, 10 neither, 3, 7, 11 empty.
    assert made.counts == {
        "grounded": 3,
        "hallucinated": 2,
        "unsure": 3,
        "errors": 4,
        "kept": 4,
    }
    assert world == [f"0: Which number is {n}?" for n in range(12)]
    kept = [row.example for row in from_jsonl(made.folder / "dataset.jsonl")]
    assert sorted(one.label for one in kept) == [0, 0, 1, 1]
    for one in kept:
        assert one.response == answer(int(one.id[1:])) and one.context == "0"
        assert one.prompt == f"0: Which number is {one.id[1:]}?"
    everything = lines(made.folder / "answers.jsonl")
    assert [row["id"] for row in everything] == [f"q{n}" for n in range(12)]
    errors = {row["id"]: row["error"] for row in everything if row["error"]}
    assert errors["q3"] == "the answer is empty"
    assert errors["q9"] == "the answer is cut off after 3 tokens"
    provenance = everything[0]["provenance"]
    assert provenance["model"] == "smollm2-135m" and provenance["judge"] == "reference"
    assert provenance["made"] == provenance["judged"] and provenance["jaxhal"]


def test_without_balance_and_with_what_holds_a_reference(world, tmp_path):
    made = make(config(tmp_path, balance=False, contained=0), progress=False)
    assert made.counts["kept"] == made.counts["grounded"] + 2 == 8


def test_the_nearness_to_a_reference(world, tmp_path):
    made = make(config(tmp_path, nearness="unigram_f1"), progress=False)
    said = {row["why"] for row in lines(made.folder / "answers.jsonl")}
    assert any("unigram F1 with" in why for why in said if why)


def test_questions_of_ones_own(world, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"id": q.id, "question": q.text, "answer": q.answer, "context": q.context}
        for q in QUESTIONS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = questions_from(path)
    assert [(q.id, q.text, q.context) for q in found] == [
        (q.id, q.text, q.context) for q in QUESTIONS
    ]
    named = make(config(tmp_path), progress=False)
    own = make(config(tmp_path, name="mine", questions=str(path)), progress=False)
    assert own.counts == named.counts
    with pytest.raises(ValueError, match="unknown option .*; it takes: none"):
        make(config(tmp_path, name="x", questions=str(path), options={"a": 1}))
    with pytest.raises(FileNotFoundError, match="no such file"):
        make(config(tmp_path, name="y", questions="none.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"question": "Why?"}', "line 2: 'answer' is null; use text"),
        ('{"question": "Why?", "answer": []}', "line 2: .*answer is"),
        ('{"question": " ", "answer": "So."}', "line 2: .*text is ' '"),
        ('{"question": "Why?", "answer": ["So.", 3]}', "line 2: 'answer' is 3"),
        ('{"question": "Why?", "answer": "So.", "context": 1}', "'context' is 1"),
        (
            '{"question": "Why?", "answer": "So.", "contex": "C"}',
            "line 2: 'contex' is not read; write 'context', or call it otherwise",
        ),
    ],
)
def test_lines_that_are_no_questions(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "Who?", "answer": ["A.", "B."]}\n' + line)
    with pytest.raises(ValueError, match=message):
        questions_from(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no question; give one a line"):
        questions_from(path)
    path.write_text('{"question": "Who?", "answer": ["A.", "B."], "source": 7}\n')
    (one,) = questions_from(path)
    assert (one.answer, one.id, one.source) == (("A.", "B."), "line 1", "7")


def test_the_overlap_rule(world, tmp_path):
    made = make(config(tmp_path, judge="overlap"), progress=False)
    assert "unsure" not in made.counts and made.counts["grounded"] == 3
    made = make(config(tmp_path, judge="overlap", contained=0), progress=False)
    assert made.counts["grounded"] == 6
    for more in ({"contained": 1}, {"refusals": True}, {"nearness": "unigram_f1"}):
        with pytest.raises(ValueError, match="judge is 'overlap', .*'contained: 0' al"):
            make(config(tmp_path, judge="overlap", **more), progress=False)


def test_a_run_that_was_killed_goes_on(world, tmp_path, monkeypatch):
    real, calls = making.generate, []

    def dying(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(making, "generate", dying)
    with pytest.raises(KeyboardInterrupt):
        make(config(tmp_path), progress=False)
    path = tmp_path / "own" / "generated.jsonl"
    assert len(lines(path)) == 10
    with path.open("ab") as file:
        file.write(b'{"id": "q10", "resp')  # a torn line
    made = make(config(tmp_path), progress=False)
    assert len(world) == len(set(world)) == 12
    assert made.counts["kept"] == 4
    assert len(lines(path)) == 12
    make(config(tmp_path), progress=False)
    assert len(world) == 12


def test_what_was_asked_before_is_no_answer(world, tmp_path):
    """A line more, and every default id is that of another question."""
    path = tmp_path / "mine.jsonl"
    rows = [{"question": q.text, "answer": q.answer} for q in QUESTIONS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, "utf-8")
    mine = config(tmp_path, questions=str(path), prompt="0: {question}")
    make(mine, progress=False)
    first = json.dumps({"question": "Which number is 20?", "answer": "20"})
    path.write_text(f"{first}\n{text}", "utf-8")
    made = make(mine, progress=False)
    for row in lines(made.folder / "answers.jsonl"):
        number = int(row["prompt"].split()[-1][:-1])
        assert row["response"] == answer(number).strip()


def test_what_another_model_of_that_name_said_is_no_answer(
    world, tmp_path, monkeypatch
):
    make(config(tmp_path), progress=False)
    path = tmp_path / "own" / "generated.jsonl"
    rows = lines(path)
    # Earlier versions did not say who wrote.
    with path.open("w") as file:
        for row in rows:
            del row["by"]
            file.write(json.dumps(row) + "\n")
    make(config(tmp_path), progress=False)
    assert len(world) == 12 and len(lines(path)) == 12
    path.unlink()
    make(config(tmp_path), progress=False)
    monkeypatch.setattr(making, "model", lambda name, *_, **__: tiny_lm(seed=1))
    make(config(tmp_path), progress=False)
    assert len(world) == 36 and len(lines(path)) == 24
    assert len({row["by"] for row in lines(path)}) == 2


def test_labels_are_judged_anew_without_asking(world, tmp_path):
    make(config(tmp_path), progress=False)
    asked = len(world)
    changes = {"balance": False, "contained": 0, "batch_size": 3}
    made = make(config(tmp_path, **changes), progress=False)
    assert made.counts["kept"] == 8 and len(world) == asked
    assert "contained: 0" in (made.folder / "config.yaml").read_text()


def test_labels_of_one_kind_leave_no_earlier_data_set(world, tmp_path, monkeypatch):
    made = make(config(tmp_path), progress=False)
    alike = Verdict(1, "so", None)
    monkeypatch.setattr(making, "_judge", lambda config: lambda *asked: alike)
    with pytest.raises(ValueError, match="0 grounded of 12; a data set needs both"):
        make(config(tmp_path, contained=0), progress=False)
    assert not (made.folder / "dataset.jsonl").exists()
    assert {row["label"] for row in lines(made.folder / "answers.jsonl")} == {1, None}
    assert "contained: 0" in (made.folder / "config.yaml").read_text()


def test_a_folder_belongs_to_one_configuration(world, tmp_path):
    make(config(tmp_path), progress=False)
    with pytest.raises(ValueError, match="another configuration made, with another se"):
        make(config(tmp_path, seed=1), progress=False)
    # What a field was not there for then, and where the folder is now, is no matter.
    path = tmp_path / "own" / "config.yaml"
    kept = [row for row in path.read_text().splitlines() if "nearness" not in row]
    path.write_text("\n".join(kept) + "\n")
    (tmp_path / "own").rename(tmp_path / "moved")
    (tmp_path / "there").mkdir()
    (tmp_path / "moved").rename(tmp_path / "there" / "own")
    asked = len(world)
    make(config(tmp_path / "there"), progress=False)
    assert len(world) == asked


def test_a_limit_draws_questions(world, tmp_path):
    made = make(config(tmp_path, limit=8, seed=3), progress=False)
    rows = lines(made.folder / "answers.jsonl")
    assert len(rows) == 8 and [r["id"] for r in rows] == sorted(
        (r["id"] for r in rows), key=lambda name: int(name[1:])
    )


def first_of(bad, good):
    """What a server says: something else to the first question."""
    return lambda question: bad if "number is 1?" in question else good


def test_an_endpoint_confirms_and_its_failures_stay_with_their_rows(
    world, tmp_path, monkeypatch
):
    yes = json.dumps({"hallucinated": "yes", "parts": ["no idea"]})
    with serving(first_of("?", yes), tmp_path, monkeypatch) as server:
        made = make(
            config(tmp_path, judge="endpoint", endpoint=server.url, endpoint_model="m"),
            progress=False,
        )
    assert made.counts["errors"] == 5 and made.counts["hallucinated"] == 1
    rows = {row["id"]: row for row in lines(made.folder / "answers.jsonl")}
    assert "of no use in 3 attempts" in rows["q1"]["error"]
    assert rows["q5"]["provenance"]["judge"] == f"endpoint: m at {server.url}"
    assert rows["q5"]["labels"] == [{"start": 0, "end": 7, "label": "hallucination"}]


def test_an_endpoint_that_hangs_costs_its_answer(world, tmp_path, monkeypatch):
    hasty = functools.partial(Endpoint, timeout=0.2)
    monkeypatch.setattr(making, "Endpoint", hasty)
    yes = json.dumps({"hallucinated": "yes", "parts": ["no idea"]})
    with serving(first_of(STALL, yes), tmp_path, monkeypatch) as server:
        judge = {"judge": "endpoint", "endpoint": server.url, "endpoint_model": "m"}
        made = make(config(tmp_path, **judge), progress=False)
    rows = {row["id"]: row for row in lines(made.folder / "answers.jsonl")}
    assert "gave no answer from 'm'" in rows["q1"]["error"]
    assert "timed out" in rows["q1"]["error"]
    assert rows["q5"]["label"] == 1 and made.counts["hallucinated"] == 1


def test_a_question_that_an_endpoint_refuses_is_an_error_of_its_row(
    world, tmp_path, monkeypatch
):
    yes = json.dumps({"hallucinated": "yes", "parts": ["no idea"]})
    with serving(first_of(400, yes), tmp_path, monkeypatch) as server:
        made = make(
            config(tmp_path, judge="endpoint", endpoint=server.url, endpoint_model="m"),
            progress=False,
        )
    rows = {row["id"]: row for row in lines(made.folder / "answers.jsonl")}
    assert "gave no answer from 'm'" in rows["q1"]["error"]
    assert rows["q5"]["label"] == 1 and made.counts["hallucinated"] == 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(questions="riddles"), "questions is 'riddles'; use one of squad, coqa"),
        (dict(judge="jury"), "judge is 'jury'; use one of reference, overlap"),
        (dict(judge="endpoint"), "an endpoint judges by all three"),
        (dict(endpoint="http://x/v1", endpoint_model="m"), "judges by all three"),
        (dict(prompt="Say something"), r"it must hold \{question\}"),
        (dict(nearness="bleu"), "nearness is 'bleu'; use one of rouge_l, unigram_f1"),
        (dict(contained=2), "contained is 2; use 0, 1 or leave it out"),
        (dict(limit=0), "limit is 0; there are 12 questions"),
        (dict(limit=13), "limit is 13; there are 12 questions"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(limit="many"), "configuration: limit: Value 'many'"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(dtype="float16"), "dtype is 'float16'"),
        (dict(heat=1.0), "configuration: .*heat"),
    ],
)
def test_wrong_configurations(world, tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(config(tmp_path, **wrong), progress=False)
    # Nothing is in the way of its correction.
    assert not [*tmp_path.rglob("config.yaml")]


def test_one_sided_answers_make_no_data_set(world, tmp_path, monkeypatch):
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: QUESTIONS[:1])
    with pytest.raises(ValueError, match="0 answers are hallucinated and 1 grounded"):
        make(config(tmp_path), progress=False)


def test_the_command(world, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nquestions: numbers\nprompt: '{context}: {question}'\n")
    run = typer.testing.CliRunner().invoke(
        cli.app, ["generate", str(path), f"out={tmp_path}"]
    )
    assert run.exit_code == 1  # some answers could not be judged
    assert "3 grounded" in run.stderr and "4 errors" in run.stderr
    wrong = typer.testing.CliRunner().invoke(cli.app, ["generate", str(path), "x=1"])
    assert wrong.exit_code == 2


def test_questions_without_their_contexts_can_be_read_back(world, tmp_path):
    made = make(config(tmp_path, prompt="{question}"), progress=False)
    rows = list(from_jsonl(made.folder / "dataset.jsonl"))
    assert rows and all(row.example for row in rows)
    # Only the first question has the context in it.
    assert [r.id for r in rows if r.example.context] == ["q0"]
    assert {row.example.source for row in rows} == {"0"}


def test_a_prompt_without_room_is_an_error_of_its_row(world, tmp_path):
    long = dataclasses.replace(QUESTIONS[0], context="much " * 9999)
    making.QUESTIONS["numbers"] = lambda: [long, *QUESTIONS[1:]]
    made = make(config(tmp_path, batch_size=1), progress=False)
    (row, *others) = lines(made.folder / "answers.jsonl")
    assert "over the model's context" in row["error"]
    assert not any("context" in (other["error"] or "") for other in others)
    assert len(world) == 11 and made.counts["errors"] == 5


def test_defaults_are_what_the_docstring_says():
    assert Making(name="a", questions="squad").temperature == 0.0


def test_real_questions_have_several_right_answers():
    try:
        squad = making.QUESTIONS["squad"]()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert len(squad) == 700 and all(one.answer for one in squad)
    answered = making.QUESTIONS["squad"](answered=True)
    assert answered == [one for one in squad if one.answer != (REFUSAL,)]
    assert len(answered) == 408
    assert len(making.QUESTIONS["coqa"]()) == 1552


def test_white_space_and_braces_in_questions(world, tmp_path, monkeypatch):
    """Texts are filled in once, and found in the prompt whatever surrounds them."""
    texts = ["Is {context} number is 0? ", " which number is 1?", "number is 5?\n"]
    some = [
        Question(
            text, text.split("is ")[-1][0], id=f"q{n}", context=" The {question}.\n"
        )
        for n, text in enumerate(texts)
    ]
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: some)
    changes = {"prompt": "{context}\n\n{question}", "balance": False}
    made = make(config(tmp_path, **changes), progress=False)
    rows = {r.example.id: r.example for r in from_jsonl(made.folder / "dataset.jsonl")}
    assert rows["q0"].question == "Is {context} number is 0?"
    assert rows["q0"].context == "The {question}."
    assert rows["q0"].prompt == "The {question}.\n\n\nIs {context} number is 0?"


def test_options_of_questions_are_checked(tmp_path):
    with pytest.raises(
        ValueError, match="unknown option 'anwsered' of 'squad'; it tak"
    ):
        make(config(tmp_path, questions="squad", options={"anwsered": True}))
