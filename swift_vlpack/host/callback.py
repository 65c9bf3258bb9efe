"""Around training: the proof before the first step, the account after every epoch."""

from __future__ import annotations

from typing import Any

from swift.callbacks import TrainerCallback
from swift.utils import get_logger, is_master

from swift_vlpack.attention.sequence_effects import noise_by_sample
from swift_vlpack.host.losses import add_up
from swift_vlpack.host.proof import attention_of, prove_isolation
from swift_vlpack.host.start import facts_of, noted
from swift_vlpack.host.use_attention import choose_for
from swift_vlpack.runlog.start_text import end_text, start_text

logger = get_logger()


class PackingCallback(TrainerCallback):
    """Registered with ms-swift as `vlpack`; `trainer` is a `PackingTrainer`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose the attention and prove isolation, on the model as it will train, or stop."""
        # Before the proof, which is of the kernel that will train.
        chosen = choose_for(self.trainer)
        if is_master():
            logger.info(chosen)
        is_wanted = self.trainer.feed.config.packing_verify
        proof = prove_isolation(self.trainer).line(attention_of(self.trainer)) if is_wanted else None
        if proof is not None and is_master():
            logger.info(proof)
        if is_wanted or self.trainer.compute_loss_func is not None:
            add_up(self.trainer)
        noise_by_sample(self.trainer)
        if is_master():
            facts = facts_of(self.trainer, attention=chosen, proof=proof)
            logger.info(text := start_text(facts))
            show_in_tensorboard(self.trainer, text, state.global_step)
            self.trainer.journal.begin(state.global_step, self.trainer.checkpoint_resumed, noted(facts))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The packs of this step are trained now."""
        self.trainer.count_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the epoch's account over all ranks, log it and write it beside the checkpoints."""
        self.trainer.close_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the run has ended by itself, and log what it trained and where to look."""
        trainer = self.trainer
        trainer.journal.end(state.global_step)
        if is_master():
            facts = {
                "step": state.global_step,
                "num_steps": state.max_steps,
                "num_ranks": trainer.feed.num_ranks,
                "packing_length": trainer.feed.config.packing_length,
                "output_dir": args.output_dir,
            }
            logger.info(end_text(facts, trainer.journal.trained_so_far))


def show_in_tensorboard(trainer: Any, text: str, step: int) -> None:
    """Add the summary to the text page of TensorBoard, if the run reports to TensorBoard."""
    for callback in trainer.callback_handler.callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:
            # Indented, because TensorBoard reads Markdown: an indented block keeps its lines.
            writer.add_text("packing", "".join(f"    {line}\n" for line in text.splitlines()), step)
