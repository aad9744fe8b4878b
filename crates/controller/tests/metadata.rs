//! Blocks with metadata: every command against a model, protection information with every wrong
//! tag, what waits for the file, and what the next process finds.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "metadata/commands.rs"]
mod commands;
mod common;
#[path = "metadata/copy.rs"]
mod copy;
#[path = "metadata/copy_across.rs"]
mod copy_across;
#[path = "metadata/copy_history.rs"]
mod copy_history;
#[path = "metadata/copy_lasting.rs"]
mod copy_lasting;
#[path = "metadata/extended.rs"]
mod extended;
#[path = "metadata/format_tags.rs"]
mod format_tags;
#[path = "metadata/formats.rs"]
mod formats;
#[path = "metadata/history.rs"]
mod history;
#[path = "metadata/lasting.rs"]
mod lasting;
#[path = "metadata/pointers.rs"]
mod pointers;
#[path = "metadata/storage.rs"]
mod storage;
#[path = "formats/store.rs"]
mod store;
#[path = "metadata/world.rs"]
mod world;
