"""Formats of files: one reader and one writer each.

dynamicemb      the files of a dump: ours, and those of the original package
sok             SparseOperationKit
one_embedding   OneEmbedding's persistent tables
parquet         columns for dataframes
safetensors     tensors
columns         a table as plain arrays: what every writer takes
described       what a file of columns says about its table
"""
