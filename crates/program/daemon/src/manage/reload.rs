//! The configuration, read again.

use super::Manager;
use super::plan::Scope;
use control::Error;
use control::api::Plan;
use std::sync::Arc;

/// Remedy in the error about a configuration file that was readable only at the start.
const REPLACED: &str = "; the sandbox lets this process read the file that it was started with, \
                        and no other one in its place: write into the file, or have it in a folder \
                        called vnvme, or give --config a folder, and start the daemon again";

fn is_refused(error: &anyhow::Error) -> bool {
    let of_system = error.downcast_ref::<std::io::Error>();
    of_system.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

impl Manager {
    /// Reads the configuration again, and applies the changes.
    ///
    /// # Errors
    /// See [`control::Daemon::reload`].
    pub fn reload(self: &Arc<Self>) -> Result<Plan, Error> {
        let Some(path) = &self.config else {
            return Err(Error::unsupported(
                "this process was started without a configuration that could be read again",
            ));
        };
        self.wait_started()?;
        let _reloading = self.worker_context.service.reloading();
        let specs = config::files::read(path).map_err(|error| {
            let replaced = if self.allow.is_confined() && is_refused(&error) {
                REPLACED
            } else {
                ""
            };
            Error::invalid(format!("{error:#}{replaced}"))
        })?;
        self.reconcile(&specs, Scope::OfConfig, false)
    }

    /// Reloads the configuration, and logs the result.
    pub fn reload_and_tell(self: &Arc<Self>) {
        // No caller would repeat the request.
        while self.wait_started().is_err() {}
        match self.reload() {
            Ok(plan) if plan.refused.is_empty() => tracing::info!(
                added = plan.added.join(" "),
                removed = plan.removed.join(" "),
                changed = plan.changed.join(" "),
                unchanged = plan.unchanged.len(),
                "the configuration was read again"
            ),
            Ok(plan) => {
                for refusal in plan.refused {
                    tracing::error!(
                        disk = refusal.disk,
                        "the configuration was read again, and cannot be applied: {}",
                        refusal.reason
                    );
                }
            }
            // The error of a file may have several lines.
            Err(error) => error.to_string().lines().for_each(|line| {
                tracing::error!("the configuration was read again: {line}");
            }),
        }
    }
}
