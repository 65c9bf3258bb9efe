"""Record what a run did, and read it back.

Begin with `events.py`, which writes a file of events as the run goes. `segments.py` reads it back as segments, one for
each start or resume. `counts.py` counts packs, steps, epochs and runs; `account.py` writes the counts of an epoch.
`losses.py`, `folder.py` and `left_out.py` read the other files of a run; `pack_log.py` writes and reads the packs of
each step. `report.py` makes the report that `vlpack report` shows; `plan_text.py` writes what a plan is, and
`summary.py` the summaries that are logged before the first step and after the last one. Nothing here imports torch or
ms-swift.
"""
