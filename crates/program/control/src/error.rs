//! Refusals of requests.

use serde::{Deserialize, Serialize};

/// Kind of a refused API request, which determines the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// HTTP status 404: no object has the given name.
    NotFound,
    /// The request conflicts with the present state: a name is taken, or a client is attached. 409.
    Conflict,
    /// HTTP status 400: the request is invalid whatever the state is.
    Invalid,
    /// HTTP status 501: this program or process lacks the function.
    Unsupported,
    /// HTTP status 500: the attempt has failed.
    Failed,
    /// HTTP status 503: the request may succeed later.
    Busy,
}

/// Refusal of an API request, with a message for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Kind of the refusal.
    pub kind: ErrorKind,
    /// Message for the user.
    pub message: String,
}

impl Error {
    /// Creates the error of a request that names an unknown object.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Creates the error of a request that conflicts with the present state.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, message)
    }

    /// Creates the error of an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Creates the error of a request for a function that this process lacks.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Creates the error of a request that was attempted and has failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    /// Creates the error of a request that may succeed later.
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
