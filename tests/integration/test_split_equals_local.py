"""The headline: the same prompts through `split`, `local` and the Hugging Face reference give the same tokens (law 3).

One cluster serves the default model twice: by a prefill and a decode worker, and by a unified one. Their step budgets
differ, so chunks and batches are composed differently, and all prompts run at once.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.types import Mode
from modelfiles.model import open_model
from tests.support.cluster import ProcessCluster
from tests.support.hf_reference import MAX_GAP, HfReference
from tests.support.prompts import awkward

NUM_TOKENS = 64
SPLIT, LOCAL = "split-model", "local-model"
TWO_MODELS = (
    f"models.0.name={SPLIT}",
    "models.0.pools={prefill: {max_step_tokens: 256}, decode: {max_step_tokens: 512, max_sequences: 12}}",
    f"models.1={{name: {LOCAL}, pools: {{unified: {{max_step_tokens: 384, max_sequences: 7}}}}, "
    "kv: {num_blocks: 400}}",
)
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessCluster]:
    async with ProcessCluster(tmp_path_factory.mktemp("cluster"), *TWO_MODELS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    prompts = awkward(open_model("smollm2-135m-instruct").tokenizer())
    assert len(prompts) >= 20
    return prompts


async def _answers(cluster: ProcessCluster, model: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        answer = await cluster.complete(prompt, model=model, max_tokens=NUM_TOKENS, ignore_eos=True)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    answers = await asyncio.gather(*[one(prompt) for prompt in prompts.values()])
    return dict(zip(prompts, answers, strict=True))


async def test_split_equals_local_equals_the_reference(cluster: ProcessCluster, prompts: dict[str, list[int]]) -> None:
    split = await _answers(cluster, SPLIT, prompts)
    status = await cluster.wait_idle()
    by_role = {(w.registration.model.name, w.registration.role.value): w for w in status.workers}
    decode = by_role[SPLIT, "decode"].load
    prompt_tokens = sum(map(len, prompts.values()))
    assert decode.prompt_tokens_computed == 0, "in split mode D computes no prompt token"
    assert by_role[SPLIT, "prefill"].load.prompt_tokens_computed == prompt_tokens
    num_blocks = sum(-(-len(prompt) // 16) for prompt in prompts.values())
    assert dict(decode.kv_bytes_received)["nixl"] == num_blocks * by_role[SPLIT, "decode"].registration.block_bytes

    local = await _answers(cluster, LOCAL, prompts)
    await cluster.wait_idle()
    for name in prompts:
        assert len(split[name]) == NUM_TOKENS
        assert split[name] == local[name], name

    # One teacher-forced pass of the reference over prompt and answer: if each token is its choice there, the answer is
    # the reference's greedy one. A first divergence is allowed at a near tie only.
    reference = HfReference(open_model("smollm2-135m-instruct"))
    num_ties = 0
    for name, prompt in prompts.items():
        logits = reference.logits([*prompt, *split[name]])[len(prompt) - 1 : -1]
        for index, (scores, token) in enumerate(zip(logits, split[name], strict=True)):
            if int(scores.argmax()) != token:
                best = scores.topk(2).values
                assert float(best[0] - best[1]) < MAX_GAP, f"{name}: token {index} is not the reference's"
                num_ties += 1
                break
    print(f"{len(prompts)} prompts, {NUM_TOKENS} tokens each: {num_ties} divergences at near ties of the reference")


async def test_a_chat_is_the_same_in_both_modes_plain_and_streamed(cluster: ProcessCluster) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    texts = set()
    for model in (SPLIT, LOCAL):
        answer = await cluster.http.post("/v1/chat/completions", json={**body, "model": model})
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["message"]["content"])
        texts.add(await cluster.streamed_text({**body, "model": model}))
    assert len(texts) == 1
    assert "Paris" in texts.pop()


async def test_seeded_sampling_is_the_same_in_both_modes(
    cluster: ProcessCluster, prompts: dict[str, list[int]]
) -> None:
    some = {name: prompts[name] for name in ("question", "17 tokens", "257 tokens", "cjk")}

    async def sampled(model: str) -> list[list[int]]:
        answers = await asyncio.gather(
            *[
                cluster.complete(prompt, model=model, temperature=1.0, top_p=0.95, seed=seed, max_tokens=24)
                for seed, prompt in enumerate(some.values())
            ]
        )
        return [answer["choices"][0]["token_ids"] for answer in answers]

    assert await sampled(SPLIT) == await sampled(LOCAL)


async def test_the_mode_is_told(cluster: ProcessCluster) -> None:
    for model, mode in ((SPLIT, Mode.SPLIT), (LOCAL, Mode.LOCAL)):
        answer = await cluster.http.post(
            "/v1/completions",
            json={"model": model, "prompt": "Hello", "max_tokens": 2},
            headers={"x-baton-timing": "1"},
        )
        timing = answer.json()["timing"]
        assert timing["mode"] == mode
        stages = timing["stages_ms"]
        assert stages["prefill"] > stages["network"], "whoever prefilled says how long it took"
