//! Verdicts of cases, and the helpers with which cases are written.

use nvme::Status;
use test_host::Completion;
use vfio_user::client::ClientError;

/// Reason why a conformance case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The controller violates the standard. The text has the expected and the actual result.
    Failed(String),
    /// The controller lacks the feature that the case tests. The text has the reason.
    NotApplicable(String),
}

/// Result of a conformance case, or of one of its steps.
pub type Check<T = ()> = Result<T, Verdict>;

/// Returns the result that ends a case as failed, with this text.
pub fn failed<T>(text: impl Into<String>) -> Check<T> {
    Err(Verdict::Failed(text.into()))
}

/// Returns the result that ends a case as not applicable, for this reason.
pub fn not_applicable<T>(reason: impl Into<String>) -> Check<T> {
    Err(Verdict::NotApplicable(reason.into()))
}

/// Ends the case as not applicable unless the condition holds.
pub fn applies_if(condition: bool, otherwise: &str) -> Check {
    if condition {
        Ok(())
    } else {
        not_applicable(otherwise)
    }
}

/// Fails with a formatted text unless the condition holds.
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::verdict::Verdict::Failed(format!($($text)+)));
        }
    };
}

/// Fails unless two numbers are equal; the text names both.
macro_rules! same {
    ($got:expr, $expected:expr, $($what:tt)+) => {{
        let (got, expected) = (u128::from($got), u128::from($expected));
        if got != expected {
            return Err($crate::verdict::Verdict::Failed(format!(
                "{}: expected {expected:#x}, got {got:#x}",
                format!($($what)+)
            )));
        }
    }};
}

pub(crate) use {require, same};

impl From<ClientError> for Verdict {
    fn from(error: ClientError) -> Self {
        anyhow::Error::from(error).into()
    }
}

impl From<anyhow::Error> for Verdict {
    fn from(error: anyhow::Error) -> Self {
        if error.is::<ClientError>() {
            return Verdict::Failed(format!("the server: {error:#}"));
        }
        Verdict::Failed(format!("{error:#}"))
    }
}

impl From<dma::MemoryError> for Verdict {
    fn from(error: dma::MemoryError) -> Self {
        Verdict::Failed(format!("the host's own memory: {error}"))
    }
}

impl From<rustix::io::Errno> for Verdict {
    fn from(error: rustix::io::Errno) -> Self {
        Verdict::Failed(format!("a system call of the host: {error}"))
    }
}

/// Checks of a command's completion.
pub trait Expect {
    /// Returns the status in the completion.
    fn status(&self) -> Status;
    /// Checks that the completion has this status, whatever its flags are.
    fn expect(&self, status: Status, what: &str) -> Check;
    /// Checks that the completion has one of these statuses.
    fn expect_one(&self, statuses: &[Status], what: &str) -> Check;
    /// Checks that the command has succeeded.
    fn succeeds(&self, what: &str) -> Check;
    /// Checks that the command has failed with this status and Do Not Retry.
    fn refused(&self, status: Status, what: &str) -> Check;
    /// Checks that the command has failed, with any status.
    fn fails(&self, what: &str) -> Check;
}

fn name(status: Status) -> String {
    let (sct, sc) = (status.sct().0, status.sc());
    format!("{status} [{sct:x}h/{sc:02x}h]")
}

impl Expect for Completion {
    fn status(&self) -> Status {
        Status::from_bits(self.status_bits())
    }

    fn expect(&self, status: Status, what: &str) -> Check {
        self.expect_one(&[status], what)
    }

    fn expect_one(&self, statuses: &[Status], what: &str) -> Check {
        if statuses.iter().any(|status| self.status().is(*status)) {
            return Ok(());
        }
        let names: Vec<String> = statuses.iter().map(|status| name(*status)).collect();
        failed(format!(
            "{what}: expected {}, got {}",
            names.join(" or "),
            name(self.status())
        ))
    }

    fn succeeds(&self, what: &str) -> Check {
        self.expect(Status::SUCCESS, what)
    }

    fn refused(&self, status: Status, what: &str) -> Check {
        self.expect(status, what)?;
        require!(
            self.status().dnr(),
            "{what}: {} without Do Not Retry, although a retry must fail again",
            name(status)
        );
        Ok(())
    }

    fn fails(&self, what: &str) -> Check {
        require!(
            !self.status().is_success(),
            "{what}: expected an error, but it succeeded"
        );
        Ok(())
    }
}
