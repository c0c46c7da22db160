"""Running a schedule under torch.distributed."""
