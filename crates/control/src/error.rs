//! Refusals of requests.

use serde::{Deserialize, Serialize};

/// Kind of a refusal, which determines the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// No object has this name: 404.
    NotFound,
    /// The request conflicts with the present state: a name is taken, or a client is attached. 409.
    Conflict,
    /// The request is invalid in any state: 400.
    Invalid,
    /// This program or process lacks the function: 501.
    Unsupported,
    /// The attempt has failed: 500.
    Failed,
    /// Temporarily unavailable: 503.
    Busy,
}

/// Refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Kind of the refusal.
    pub kind: ErrorKind,
    /// Message for the user.
    pub message: String,
}

impl Error {
    /// Makes the error of an unknown name.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Makes the error of a request that conflicts with the present state.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, message)
    }

    /// Makes the error of an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Makes the error of a missing function.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Makes the error of a failed attempt.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    /// Makes the error of a request that may succeed later.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Busy, message)
    }

    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}
