"""Tracing: a user's model -> OpGraph, for every batch size, without a weight in memory.

    model file --trace (torch.export)--> one batch size --+
               --second_run------------> another ---------+--overlaid_graph--> ops --segments--> OpGraph
               --module_level (whole modules, where torch.export fails)------------------------> OpGraph

model_source is what there is to trace, of a file or of a live module.

constant_masks, known_branches, dissolved, in_place_writes, effects, refused_writes and host_reads are what a trace gets
wrong or leaves out; shapes_by_values has the shapes that torch does not tell, meta_autocast the autocast that it lacks;
given_values and written_slices are tensors that forward makes of numbers, or fills piece by piece; whole_dropout is
dropout that torch took apart; same_operators compares two runs; second_names has the operators with two names; batches
are those of the user; operand_dtypes are those that targets may have; returned_loss is what may be a loss;
sync_batch_norm is BatchNorm that looks for other ranks; model_building calls the user's build_model; local_modules are
those beside the model file; optimizer_trial tries the user's optimizer on parts of tensors; source_names finds the
user's names, places the lines that errors name; hugging_face writes the model file of a configuration, of
hugging_face_templates; graph_cache keeps graphs on disk.
"""
