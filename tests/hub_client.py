"""A user of the Hub in a process of her own, since HF_ENDPOINT counts at import.

A program, not a test. `python hub_client.py serve` answers each line of standard input, a JSON list
of a token (or null), a command and its arguments, with one line: `push FOLDER REPO OPTIONS` the URL
and what was said, or the error; `licence BASE` what the Hub knows of a base; `base NAME MODEL`
whether NAME may be given as the Hub id of MODEL; `download REPO` the folder that
`snapshot_download` made.
`python hub_client.py load BASE REPO IDS` fetches an adapter with `snapshot_download`, loads it with
plain peft and prints the log-probs of the ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def push(folder: str, repo: str, options: dict) -> dict:
    from qerl.errors import QerlError
    from qerl.hub import push

    said: list[str] = []
    try:
        url = push(Path(folder), repo, **options, say=said.append)
    except QerlError as error:
        return {"error": str(error), "said": said}
    return {"url": url, "said": said, "torch": "torch" in sys.modules}


def load(base: str, repo: str, ids: str) -> dict:
    import torch
    from huggingface_hub import snapshot_download
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = snapshot_download(repo)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, folder).eval()
    tokens = torch.tensor([json.loads(ids)])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].double(), dim=-1)
    picked = logp.gather(1, tokens[0, 1:, None])[:, 0]
    return {
        "logprobs": picked.tolist(),
        "tokenizer": AutoTokenizer.from_pretrained(folder).chat_template is not None,
        "qerl": sorted(name for name in sys.modules if name.split(".")[0].startswith("qerl")),
    }


def download(repo: str) -> dict:
    from huggingface_hub import snapshot_download

    return {"folder": snapshot_download(repo)}


def licence(base: str) -> dict:
    from qerl.config import Recipe
    from qerl.hub import licence_of

    said: list[str] = []
    return {"licence": licence_of(Recipe(model=base), base, said.append), "said": said}


def base(name: str, model: str) -> dict:
    from qerl.base_name import check_base_id
    from qerl.errors import QerlError

    said: list[str] = []
    try:
        check_base_id(name, model, said.append)
    except QerlError as error:
        return {"error": str(error), "said": said}
    return {"said": said}


def serve() -> None:
    for line in sys.stdin:
        token, command, *arguments = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if token is not None:
            os.environ["HF_TOKEN"] = token
        commands = {"push": push, "licence": licence, "download": download, "base": base}
        answer = commands[command](*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        assert sys.argv[1] == "load", sys.argv
        print(json.dumps(load(*sys.argv[2:])))
