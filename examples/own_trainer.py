"""Train packed in a loop of your own: plain PyTorch, with a model and a template of ms-swift.

Without arguments it trains a tiny random Qwen2.5-VL on made-up rows, on any machine and without a network:

    python examples/own_trainer.py
    python examples/own_trainer.py --model Qwen/Qwen2.5-VL-7B-Instruct --data data/captions.jsonl --length 8192

docs/own_trainer.md has the loop too, and says what each line is for.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from swift.model import get_model_processor
from swift.template import get_template
from torch.utils.data import DataLoader

from swift_vlpack import Collator, PackingConfig, PackingDataset, prepare_model, prove


def train(model, template, rows, length, num_epochs=3):
    """Train on packs of `length` tokens, and print the mean loss of every epoch."""
    prepare_model(model, template).train()  # attention that walks the samples, images as the template makes them

    config = PackingConfig(packing_length=length, packing_strategy="exact")
    packs = PackingDataset(rows, template, config, num_epochs=num_epochs)
    print(prove(model, template, packs))  # "isolation verified: ...", or an IsolationError with the cause

    loader = DataLoader(packs, batch_size=1, collate_fn=Collator(template), num_workers=2)  # one pack is one batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(num_epochs):
        packs.set_epoch(epoch)  # mixes and packs anew
        losses = []
        for batch in loader:  # batch.record: which samples, how long
            loss = model(**batch.to(model.device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(json.dumps({"epoch": epoch, "loss": sum(losses) / len(losses), "packs": len(losses)}))


def main():
    """Read the arguments, or make a model and rows to try it with."""
    parser = argparse.ArgumentParser(description="Train packed in a plain PyTorch loop.")
    parser.add_argument("--model", help="a name on a hub, or a folder; a tiny random one without it")
    parser.add_argument("--model_type", help="ms-swift's name for the kind of model, where a folder does not tell it")
    parser.add_argument("--template", help="ms-swift's name for the template, where the kind has several")
    parser.add_argument("--data", type=Path, help="JSON lines of ms-swift's form; made up without it")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a pack, and the most of a sample")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model, args.model_type, args.template = tiny_model(Path(folder)), "qwen2_5_vl", "qwen2_5_vl"
        rows = read_rows(args.data) if args.data else made_up_rows(Path(folder))
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model, processor = get_model_processor(args.model, model_type=args.model_type, torch_dtype=dtype)
        template = get_template(processor, template_type=args.template, max_length=args.length)
        train(model, template, rows, args.length)


def read_rows(path):
    """Read JSON lines; rows of an ms-swift data set do as well."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tiny_model(folder):
    """Write a Qwen2.5-VL of two layers and random weights; the tests of the checkout know how."""
    command = [sys.executable, "-m", "tests.tiny", str(folder / "model"), "qwen2_5_vl"]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True, stdout=subprocess.DEVNULL)
    return str(folder / "model")


def made_up_rows(folder):
    """Make 30 rows of many lengths, two of three with an image of noise."""
    rng = random.Random(0)
    rows = []
    for number in range(30):
        question, answer = "what is this?", " ".join(["noise"] * rng.randint(5, 90))
        images = [str(folder / f"{number}.jpg")] if number % 3 else []
        for image in images:
            size = (rng.randint(60, 300), rng.randint(60, 300))
            Image.effect_noise(size, 64).convert("RGB").save(image)
            question = f"<image>{question}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": images})
    return rows


if __name__ == "__main__":
    main()
