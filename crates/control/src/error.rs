//! Why a request is refused.

use serde::{Deserialize, Serialize};

/// Kind of a refusal, which determines the status of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// There is nothing of this name: 404.
    NotFound,
    /// The request conflicts with the present state: the name is taken, or a client is attached.
    /// 409.
    Conflict,
    /// The request is wrong whatever is served: 400.
    Invalid,
    /// This program, or this process, cannot do that: 501.
    Unsupported,
    /// The attempt has failed: 500.
    Failed,
    /// Not yet, or not now: 503.
    Busy,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Kind of the refusal.
    pub kind: ErrorKind,
    /// A sentence for the user.
    pub message: String,
}

impl Error {
    /// There is nothing of this name.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Makes the error of a request that conflicts with the present state.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, message)
    }

    /// The request is wrong whatever is served.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// This program, or this process, cannot do that.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Makes the error of a failed attempt.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    /// Not yet, or not now.
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
