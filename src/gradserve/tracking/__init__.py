"""What a training tells while it goes on: metrics by name, and where they are written.

tracker      Tracker: one log call, every sink; a sink that fails never stops a training
sinks/       one file for each: JSON lines, TensorBoard, Weights & Biases, MLflow
statistics   means with confidence intervals
rl_metrics   what episodes and log-probs tell about a policy
names        what each metric means
"""

from gradserve.tracking.sinks import SinkUnusable
from gradserve.tracking.statistics import Estimate, estimate
from gradserve.tracking.tracker import Tracker

__all__ = ["Estimate", "SinkUnusable", "Tracker", "estimate"]
