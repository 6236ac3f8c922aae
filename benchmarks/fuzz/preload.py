"""What the server imports from which invocations of the command line are forked."""

from __future__ import annotations

import matplotlib.backends.backend_svg  # noqa: F401
import rich.console
import rich.table  # noqa: F401
import torch  # noqa: F401
import yaml  # noqa: F401

import ds_hetero.cli.app
import ds_hetero.cli.compare
import ds_hetero.cli.doctor_section
import ds_hetero.cli.outputs.pipelines
import ds_hetero.cli.outputs.pipelines_picture
import ds_hetero.cli.outputs.schedule_picture
import ds_hetero.cli.plan
import ds_hetero.cli.profile
import ds_hetero.cli.replan
import ds_hetero.cli.replicas
import ds_hetero.cli.show
import ds_hetero.cli.simulate  # noqa: F401
