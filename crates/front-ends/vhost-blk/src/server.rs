//! A single export on the calling thread, with its own worker, for programs that serve nothing
//! else.

use crate::backend::{Backend, Export};
use crate::error::Error;
use crate::stats::Stats;
use std::rc::Rc;
use std::sync::Arc;
use volume::Io;
use worker::{Handle, Options, Worker};

/// Server of one export on the thread that has created it.
pub struct Server {
    worker: Worker<Backend>,
    stats: Arc<Stats>,
}

fn failed(error: worker::Error<Error>) -> Error {
    match error {
        worker::Error::System { call, errno } => Error::System { call, errno },
        worker::Error::NotDurable(limit) => Error::Flush(format!("not within {limit:?}")),
        worker::Error::GivenUp(volume) => Error::Flush(format!("{volume} does not answer")),
        worker::Error::Frontend(error) => error,
    }
}

impl Server {
    /// Opens the volume for this thread, on its `io`. With [`volume::IoOptions::fixed_buffers`] the
    /// guest's memory is pinned for its requests.
    ///
    /// # Errors
    /// [`Error::Option`] for options that conflict with each other or the volume. [`Error::Volume`]
    /// when the volume cannot be opened, [`Error::System`] when a system call fails.
    pub fn new(export: Export, io: Io, options: Options) -> Result<Server, Error> {
        let handle = Handle::new().map_err(failed)?;
        let mut worker = Worker::new(Rc::new(io), &handle, options).map_err(failed)?;
        let mut stats = None;
        worker.add(|context| {
            let backend = Backend::new(export, context)?;
            stats = Some(backend.stats());
            Ok::<_, Error>(backend)
        })?;
        match stats {
            Some(stats) => Ok(Server { worker, stats }),
            None => unreachable!("an empty worker has room"),
        }
    }

    /// Returns the counters of the export.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// Serves until asked to end, then answers outstanding requests and makes all data durable.
    ///
    /// # Errors
    /// [`Error::System`] when the loop cannot continue; [`Error::Flush`] when data did not become
    /// durable.
    pub fn run(&mut self) -> Result<(), Error> {
        self.worker.run().map_err(failed)
    }

    /// Polls all sources once and handles them, without sleeping, for threads with a loop of their
    /// own. Returns `true` when it is time to end, which [`Server::run`] then does.
    ///
    /// # Errors
    /// [`Error::System`] when the loop cannot continue.
    pub fn poll(&mut self) -> Result<bool, Error> {
        self.worker.poll_once().map_err(failed)
    }
}
