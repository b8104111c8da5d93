"""Translation: {"source": "...", "reference": "..."}. BLEU and chrF of sacrebleu on the first generated line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.evaluate.generate import Sampling, generate, prompt_room
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import RESAMPLES, EvalScore
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, solved_examples


class Translation(Suite):
    kind = "translation"
    fields = ("source", "reference")

    @staticmethod
    def solved_text(item: Item) -> str:
        return f"{item['source']}\n{item['reference']}"

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        if "{source}" not in options.template:
            raise ConfigError(
                "evaluate.template-without-source",
                f"the template {options.template!r} has no {{source}}",
                hint='for example "Dutch: {source}\\nEnglish:"',
            )

        def question(item: Item) -> str:
            return options.template.replace("{source}", item["source"])

        sampling = Sampling(tokens=options.max_tokens, temperature=0)
        room = prompt_room(opened, options.max_tokens)
        translations, cut = [], 0
        for number, item in enumerate(items):
            examples = solved_examples(items, number, options.shots, lambda i: question(i) + i["reference"])
            prompt = tokenizer.encode(examples + question(item))
            cut += len(prompt) > room
            generated = generate(
                opened.model,
                prompt[-room:],
                sampling,
                eos=tokenizer.eos,
                stop=lambda ids: "\n" in tokenizer.decode(ids).lstrip(),
            )
            lines = tokenizer.decode(generated.ids).lstrip().splitlines()
            translations.append(lines[0].strip() if lines else "")
            options.progress(number + 1, len(items))
        return translation_scores(task, items, translations, {"shots": options.shots, "cut": cut})


def translation_scores(
    task: str, items: Sequence[Item], translations: Sequence[str], detail: Mapping[str, Any]
) -> list[EvalScore]:
    """BLEU and chrF with intervals over resampled sentences."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ConfigError(
            "evaluate.sacrebleu-missing",
            "translation scores need the package sacrebleu",
            hint="pip install 'windlass[eval]'",
        ) from None
    scores = []
    for group, inside in groups(items).items():
        texts, references = [translations[i] for i in inside], [items[i]["reference"] for i in inside]
        for name, metric in (("bleu", BLEU(effective_order=False)), ("chrf", CHRF())):
            score = EvalScore(
                task=task,
                group=group,
                metric=name,
                value=metric.corpus_score(texts, [references]).score,
                count=len(inside),
                detail={"kind": Translation.kind, **detail},
            )
            if len(texts) > 1:
                # The counts of one sentence are computed once; a resample only adds them up.
                counts: Any = np.array(metric._extract_corpus_statistics(texts, [references]))
                random = np.random.default_rng(0)
                samples = [random.integers(0, len(texts), len(texts)) for _ in range(RESAMPLES // 4)]
                values = [metric._aggregate_and_compute(counts[sample].tolist()).score for sample in samples]
                low, high = np.quantile(values, (0.025, 0.975)).tolist()
                score = replace(score, low=low, high=high)
            scores.append(score)
    return scores
