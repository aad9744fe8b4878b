//! Validation of a configuration before anything is opened, by crate `config` and with the parts
//! that this build has.

mod files;

pub use files::{Findings, check_files};

use crate::confine::path_check::PathAnswers;
use crate::parts;
use anyhow::Result;
use config::spec::Specs;
use std::path::Path;

/// Refuses parts that this build does not contain, and what [`config::check::check`] refuses.
///
/// # Errors
/// A sentence for the user.
pub fn check(specs: &Specs, control: Option<&Path>, answers: &PathAnswers) -> Result<()> {
    parts::check(specs)?;
    config::check::check(specs, control, &|path| answers.is_unanswered(path))
}
