"""All workflows; `WORKFLOWS` is what a worker is made with."""

from workflows.fleet import Fleet
from workflows.model_check import ModelCheck
from workflows.model_job import ModelJob
from workflows.node import Node
from workflows.reconcile import Reconcile
from workflows.replica import Replica

WORKFLOWS = (ModelJob, ModelCheck, Fleet, Reconcile, Replica, Node)
