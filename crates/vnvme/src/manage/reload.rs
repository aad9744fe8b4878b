//! The configuration, read again.

use super::Manager;
use super::plan::Scope;
use control::Error;
use control::api::Plan;
use std::sync::Arc;

impl Manager {
    /// Reads the configuration again, and applies it.
    ///
    /// # Errors
    /// See [`control::Daemon::reload`].
    pub fn reload(self: &Arc<Self>) -> Result<Plan, Error> {
        let Some(path) = &self.config else {
            return Err(Error::unsupported(
                "this process was started without a configuration that could be read again",
            ));
        };
        let specs =
            crate::config::read(path).map_err(|error| Error::invalid(format!("{error:#}")))?;
        self.reconcile(&specs, Scope::OfConfig, false)
    }

    /// The same, for the log.
    pub fn reload_and_tell(self: &Arc<Self>) {
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
            Err(error) => {
                tracing::error!("the configuration was read again: {error}");
            }
        }
    }
}
