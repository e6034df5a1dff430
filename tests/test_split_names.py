"""What a plan splits, in the field's words, read off the layouts that the program picks by itself."""

from dataclasses import replace

from distributed.families import family_plan
from distributed.programs import graph_of, make_plan

from autoplan.answers.answer import Answer, answer_from_json, answer_to_json
from autoplan.report.plan import plan_report, program_header
from autoplan.tensor_parallel.split_names import splits


def test_a_transformer_is_split_by_heads_columns_rows_and_vocabulary():
    found = splits(graph_of("gpt"), family_plan("gpt", "TP 2"))
    assert set(found) == {"attention by heads", "weights by columns and rows", "vocabulary"}
    found = splits(graph_of("gpt"), family_plan("gpt", "TP 2, split sequence"))
    assert found[0] == "sequence between blocks (sequence parallelism)"


def test_without_tensor_parallelism_nothing_is_said():
    assert splits(graph_of("gpt"), make_plan("gpt", dp=2)) == ()


def test_an_answer_says_it_in_report_program_and_json(answer: Answer) -> None:
    said = replace(answer, splits=("attention by rows of the query (context parallelism)", "vocabulary"))
    line = "tensor parallel: attention by rows of the query (context parallelism);\nvocabulary\n"
    assert line in plan_report(said)
    assert "attention by rows of the query (context" in program_header(said, launch_line="torchrun")
    assert answer_from_json(answer_to_json(said), where="plan.json").splits == said.splits
