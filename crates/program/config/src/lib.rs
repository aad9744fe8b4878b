//! Configuration of the program: options, disks, and the process that serves them.
//!
//! [`options`] defines every option once, as a row of a table, from which flags, keys of files and
//! options of URLs follow. [`spec`] has the structures that the rows fill. [`files`] reads them
//! from a file or a folder of fragments, [`origin`] remembers the line of each, and
//! [`mod@check`] validates the whole. Nothing is opened or served here.
#![forbid(unsafe_code)]

pub mod access;
pub mod ana;
pub mod check;
pub mod choices;
pub mod disk;
pub mod error_policy;
pub mod files;
pub mod identity;
pub mod options;
pub mod origin;
pub mod request;
pub mod spec;
pub mod usage_error;
pub mod volumes;
