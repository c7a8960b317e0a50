"""The rooms of a replay buffer, which `shmbuf.replay_buffer` puts together: what it writes, reads, edits, transforms, draws ahead."""
