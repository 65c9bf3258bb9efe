import json, random
from pathlib import Path
import pytest
from tests.host.feed.test_streamed import *
from tests.data_rows import image_row, sentence, text_row
from tests.images import photo

def data(tmp_path, n=30, per=3):
    rng = random.Random(3)
    rows=[]
    for k in range(n//per):
        im = photo(tmp_path, f"p{k}", 60+4*k, 60, seed=k)
        rows += [image_row([im], sentence(rng,3,12)+"?", sentence(rng,2,6)) for _ in range(per)]
    rows += [text_row(sentence(rng,3,9), sentence(rng,2,30)) for _ in range(6)]
    rng.shuffle(rows)
    return rows

@pytest.mark.parametrize("strategy", ["binpack","greedy","exact","best_fit"])
@pytest.mark.parametrize("form", ["sized","stream"])
def test_a(template, form, strategy, tmp_path):
    rows = data(tmp_path)
    opts = dict(packing_strategy=strategy, packing_share="media", packing_buffer=8)
    full = records(buffered(template, rows, form, **opts))
    assert set(everything(full).values()) == {1} and len(everything(full)) == len(rows)
    print(strategy, form, len(full), [r.shared for r in full], [r.num_tokens for r in full])
    assert any(r.shared for r in full)
    for k in range(len(full)+1):
        again = buffered(template, rows, form, **opts)
        again.restore(progress_after(full[:k], 0))
        got = records(again)
        assert contents(got) == contents(full[k:]), k
        assert [r.shared for r in got] == [r.shared for r in full[k:]]
