"""Reports of runs: one versioned JSON schema, and the machine they ran on."""

from hybrid_kv.report.run import Environment, probe_environment
from hybrid_kv.report.schema import SCHEMA, Report, RunReport, read_report

__all__ = ["SCHEMA", "Environment", "Report", "RunReport", "probe_environment", "read_report"]
