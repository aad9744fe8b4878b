//! Blocks with metadata: every command against a model, protection information with every wrong
//! tag, what waits for the file, and what the next process finds.

mod commands;
mod copy;
mod copy_across;
mod copy_history;
mod copy_lasting;
mod extended;
mod format_tags;
mod formats;
mod history;
mod lasting;
mod pointers;
mod storage;
use crate::formats::store;
mod world;
