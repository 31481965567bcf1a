"""What the page on engines says runs, against stand-ins of what it is called by."""

import asyncio
import json
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_exported import DEPTH, EXAMPLES, agree, said, whole_probe

import jaxhal
from jaxhal.cli.exported import _numbers
from jaxhal.features.hidden import state_number
from jaxhal.models.lm import outline
from jaxhal.types import Example, Turn
from tiny_lm import tiny_lm, write_lm

PAGE = (Path(__file__).parent.parent / "notebooks" / "engines.md").read_text("utf-8")
NAMES = ["predictive_probability"]
ASKED = Example("So it is.", turns=(Turn("user", "Why?"),))
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that was tuned to chat."""
    tokenizer = tiny_lm().tokenizer.hf
    tokenizer.chat_template = TEMPLATE
    place = tmp_path_factory.mktemp("model") / "tiny"
    return write_lm(place, tokenizer=tokenizer, num_hidden_layers=DEPTH)


@pytest.fixture(scope="module")
def lm(folder):
    return jaxhal.load(folder)


def block(text, kind="python"):
    """The one block of code on the page that has a text."""
    blocks = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [each for each in blocks if text in each]
    return found


def stand_in(monkeypatch, name, **held):
    """A module that cannot be imported here, and those that it is in."""
    for part in range(name.count(".") + 1):
        inner = name.rsplit(".", part)[0]
        monkeypatch.setitem(sys.modules, inner, types.ModuleType(inner))
    vars(sys.modules[name]).update(held)


def run(code, **names):
    exec(compile(code, "engines.md", "exec"), names)
    return names


def recipe(text, **names):
    code = block(text)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    return run(code, **names)


def test_langchain(monkeypatch, folder, lm):
    stand_in(monkeypatch, "langchain_core.callbacks", BaseCallbackHandler=object)
    handler = recipe("langchain_core")["Verdicts"](outline(folder), NAMES)
    human = types.SimpleNamespace(type="human", content="Why?")
    meta = {"logprobs": said(lm, ASKED, "chat")}
    answer = types.SimpleNamespace(
        text=ASKED.response, message=types.SimpleNamespace(response_metadata=meta)
    )
    handler.on_chat_model_start({}, [[human]], run_id=7, tags=None)
    result = types.SimpleNamespace(generations=[[answer]])
    handler.on_llm_end(result, run_id=7, parent_run_id=None)
    agree([handler.reports[7]], jaxhal.score(lm, [replace(ASKED, id="7")], NAMES))
    assert not handler.asked


class Model:
    """In the place of pydantic's: fields by name."""

    def __init__(self, **fields):
        vars(self).update(reports=[], **fields)


def test_llama_index(monkeypatch, folder, lm):
    name = "llama_index.core.instrumentation.event_handlers"
    stand_in(monkeypatch, name, BaseEventHandler=Model)
    handler = recipe("llama_index")["Verdicts"](lm=outline(folder), detectors=NAMES)
    logprobs = types.SimpleNamespace(model_dump=lambda: said(lm, ASKED, "chat"))
    response = types.SimpleNamespace(
        message=types.SimpleNamespace(content=ASKED.response),
        raw=types.SimpleNamespace(choices=[types.SimpleNamespace(logprobs=logprobs)]),
    )
    role = types.SimpleNamespace(value="user")
    event = types.SimpleNamespace(
        class_name=lambda: "LLMChatEndEvent",
        messages=[types.SimpleNamespace(role=role, content="Why?")],
        response=response,
    )
    handler.handle(event)
    handler.handle(types.SimpleNamespace(class_name=lambda: "LLMChatStartEvent"))
    agree(handler.reports, jaxhal.score(lm, [ASKED], NAMES))


@pytest.fixture
def detected(monkeypatch):
    """What the metrics ask, of a reader that always says the same."""
    asked = []

    def detect(reader, **text):
        asked.append(text)
        if reader == "bare":
            return types.SimpleNamespace(probability=None, undecided="none is fitted")
        return types.SimpleNamespace(probability=0.25, verdict="supported")

    monkeypatch.setattr(jaxhal, "detect", detect)
    monkeypatch.setattr(jaxhal, "load", lambda name: name)
    return asked


TEXTS = {"context": "One.\n\nTwo.", "question": "What?", "response": "This."}


def test_ragas(monkeypatch, detected):
    def numeric_metric(name, allowed_values):
        return lambda function: function

    def result(value, reason):
        return value, reason

    stand_in(
        monkeypatch,
        "ragas.metrics",
        MetricResult=result,
        numeric_metric=numeric_metric,
    )
    supported = recipe("ragas")["supported"]
    found = supported(
        user_input="What?", response="This.", retrieved_contexts=["One.", "Two."]
    )
    assert found == (0.75, "supported") and detected == [TEXTS]
    monkeypatch.setattr(jaxhal, "load", lambda name: "bare")
    bare = recipe("ragas")["supported"]
    with pytest.raises(ValueError, match="none is fitted"):
        bare(user_input="What?", response="This.", retrieved_contexts=["One."])


def test_deepeval(monkeypatch, detected):
    stand_in(monkeypatch, "deepeval.metrics", BaseMetric=object)
    metric = recipe("deepeval")["Supported"]("reader")
    case = types.SimpleNamespace(
        input="What?", actual_output="This.", retrieval_context=["One.", "Two."]
    )
    assert metric.measure(case) == metric.score == 0.75 and metric.success
    assert asyncio.run(metric.a_measure(case)) == 0.75
    assert detected == [TEXTS] * 2 and metric.reason == "supported"
    with pytest.raises(ValueError, match="none is fitted"):
        recipe("deepeval")["Supported"]("bare").measure(case)


def test_states_of_transformers(tmp_path, folder, lm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    write = recipe("def write_states")["write_states"]
    some = EXAMPLES[:2]
    for one in some:
        write(model, lm.tokenizer, one, tmp_path / f"{one.id}.safetensors")
    chosen = [whole_probe(), *NAMES]
    found = jaxhal.score_states(folder, some, tmp_path, chosen)
    agree(found, jaxhal.score(lm, some, chosen))


def test_requests(monkeypatch):
    """They are what vLLM takes, and the tokens those of the answer."""
    sent = []

    def create(**request):
        sent.append(request)
        return types.SimpleNamespace(kv_transfer_params={"hidden_states_path": "x"})

    creates = types.SimpleNamespace(create=create)
    chat = types.SimpleNamespace(completions=creates)
    client = types.SimpleNamespace(chat=chat, completions=creates)
    run(block("include_output_tokens"), client=client, messages=[])
    assert sent[0]["extra_body"] == {
        "kv_transfer_params": {"include_output_tokens": True}
    }
    row = types.SimpleNamespace(prompt_ids=np.array([3]), response_ids=np.array([4, 1]))
    tokens = types.SimpleNamespace(encode_example=lambda example: row)
    reader = types.SimpleNamespace(tokenizer=tokens)
    monkeypatch.setattr("jaxhal.models.lm.outline", lambda name: reader)
    run(block("prompt=ids"), client=client, example=EXAMPLES[0])
    assert sent[1]["prompt"] == [3, 4, 1] and sent[1]["max_tokens"] == 1


def test_the_command_repeats_what_the_server_was_told():
    serve = shlex.split(block("vllm serve", "bash").replace("\\\n", " "))
    spec, transfer = (
        json.loads(serve[serve.index(f"--{name}") + 1])
        for name in ("speculative_config", "kv_transfer_config")
    )
    layers = spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    line, *_ = block("--states", "bash").splitlines()
    score = shlex.split(line)
    assert _numbers(score[score.index("--layers") + 1]) == layers
    place = transfer["kv_connector_extra_config"]["shared_storage_path"]
    assert score[score.index("--states") + 1] == place
    assert "state_number(0.67, 36) == 24" in PAGE and state_number(0.67, 36) == 24
