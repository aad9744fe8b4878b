//! Error policy of requests, as options state it.

use clap::ValueEnum;
use serde::Deserialize;
use volume::{ErrorAction, OnError};

/// Error policy for reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnReadError {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Retry for 20 seconds with growing pauses, then report the error.
    Retry,
    /// Hold the request and all later ones until "vnvme resume".
    Stop,
}

/// Error policy for writes, zeroing and deallocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnWriteError {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Retry for 20 seconds with growing pauses, then report the error.
    Retry,
    /// Hold the request and all later ones until "vnvme resume".
    Stop,
    /// Like stop when space runs out, otherwise like report.
    EnospcStop,
}

impl From<OnReadError> for ErrorAction {
    fn from(action: OnReadError) -> Self {
        match action {
            OnReadError::Report => Self::Report,
            OnReadError::Retry => Self::Retry,
            OnReadError::Stop => Self::Stop,
        }
    }
}

impl From<OnWriteError> for ErrorAction {
    fn from(action: OnWriteError) -> Self {
        match action {
            OnWriteError::Report => Self::Report,
            OnWriteError::Retry => Self::Retry,
            OnWriteError::Stop => Self::Stop,
            OnWriteError::EnospcStop => Self::EnospcStop,
        }
    }
}

/// Returns the error policy of a configuration entry.
pub fn policy(read: Option<OnReadError>, write: Option<OnWriteError>) -> OnError {
    OnError {
        read: read.unwrap_or_default().into(),
        write: write.unwrap_or_default().into(),
    }
}
