"""The parts of `two_gpu_pipeline.py`: each runs on ranks of its own, so that what fails in one harms no other."""
