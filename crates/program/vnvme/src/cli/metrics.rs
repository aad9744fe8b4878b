//! `vnvme metrics`.

use super::instances::{self, AllInstances, Answers};
use super::target::ControlSocket;
use anyhow::Result;
use clap::Args;
use control::Client;
use metrics::MergedExposition;

/// Options of `vnvme metrics`.
#[derive(Args)]
pub struct MetricsArgs {
    #[command(flatten)]
    control: ControlSocket,
    #[command(flatten)]
    all: AllInstances,
}

impl MetricsArgs {
    /// Prints the metrics of a process, or of all.
    pub fn run(self) -> Result<()> {
        if !self.all.all {
            return print(&self.control.client()?.metrics()?);
        }
        let instances = instances::find(&self.control)?;
        let Answers {
            answers,
            unanswered,
        } = instances::ask_all(&instances, Client::metrics);
        let mut merged = MergedExposition::default();
        for instance in &instances {
            let answer = answers.iter().find(|(name, _)| *name == instance.name);
            merged.add(&instance.name, answer.map(|(_, text)| text.as_str()));
        }
        print(&merged.finish())?;
        instances::check(&unanswered)
    }
}

fn print(text: &str) -> Result<()> {
    output::line(format_args!("{}", text.trim_end()))?;
    Ok(())
}
