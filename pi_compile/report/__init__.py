"""A placement explained on one self-contained page, with figures and tables."""

from pi_compile.report.explanation import explain
from pi_compile.report.page import PAGE_MARK, answer_of, report_page
