"""Show packs and runs to people: in a terminal, as JSON, and as HTML pages that need no network.

`values.py` defines plain values for a pack, a sample and a step as they are shown, and their JSON. `make_values.py`
makes packs from the plan, the tensors and the rows of training. `terminal.py` shows them as text, `browser.py` as a
page of their JSON, and both make every text of a row safe (`safe_text.py`). Reports of a run (`report.py`,
`report_page.py`) are also shown as text or as HTML. `page.py` has the frame of every HTML page.

>>> from swift_vlpack.pages.terminal import pack_parts, printed
>>> from swift_vlpack.pages.values import Member, PackShown, Piece, SequenceTensors
>>> sample = Member(
...     id="chat:7", where="chat.jsonl:8", source="chat", start=0, num_tokens=6, num_supervised=2, num_vision=0,
...     positions={"token": (0, 5)}, pieces=[Piece("prompt", 4, "Who?"), Piece("supervised", 2, "Me.")],
... )
>>> tensors = SequenceTensors(
...     input_ids=[5, 6, 7, 8, 1, 2], labels=[-100] * 4 + [1, 2], position_ids=[[0, 1, 2, 3, 4, 5]], cu_seqlens=[0, 6]
... )
>>> pack = PackShown(
...     epoch=0, number=3, num_packs=9, rank=0, step=2, packing_length=8, members=[sample], sequence=tensors
... )
>>> pack.fill, pack.as_json()["num_supervised"]
(0.75, 2)
>>> lines = printed(pack_parts(pack, width=78), width=78, is_colourful=False).splitlines()
>>> for line in lines[-4:-1]:
...     print(line)
A chat:7: tokens 0-5 of the sequence; positions: token 0-5
  Who?
+ Me.
"""
