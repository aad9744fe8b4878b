//! Construction of a controller: a new one, or one that continues from the state that the previous
//! process left.

use super::disk::{InitialDescriptors, PreviousDisk, Survival};
use crate::front::irq_eventfd::IrqEventfd;
use anyhow::Result;
use controller::{
    Controller, ControllerConfig, DoorbellPage, IrqSink, NamespaceConfig,
    RetainedObjects as KeptThings,
};
use dma::{Memory, MemoryCache};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use vfio_user::Listener;
use volume::Io;

/// Parts that are needed to create or restore a controller.
pub struct ControllerParts<'a> {
    pub id: u16,
    pub config: ControllerConfig,
    pub namespaces: Vec<NamespaceConfig>,
    pub io: &'a Io,
    pub page: DoorbellPage,
}

/// Resources of the client that the previous process's controller has used, such as its memory.
struct ClientResources<'a> {
    fds: &'a BTreeMap<NonZeroU32, OwnedFd>,
    memories: &'a mut MemoryCache,
    buffer: Option<OwnedFd>,
}

impl ClientResources<'_> {
    fn copy(&self, number: NonZeroU32) -> Option<OwnedFd> {
        self.fds.get(&number)?.try_clone().ok()
    }
}

impl KeptThings for ClientResources<'_> {
    fn memory(&mut self, number: NonZeroU32, end: u64, writable: bool) -> Option<Memory> {
        let fd = self.copy(number)?;
        match self.memories.import(fd, end, writable) {
            Ok(memory) => {
                memory.set_kept(number);
                Some(memory)
            }
            Err(error) => {
                tracing::error!(%error, "kept guest memory");
                None
            }
        }
    }

    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>> {
        let sink = IrqEventfd::new(self.copy(number)?, Some(number)).ok()?;
        Some(Arc::new(sink))
    }

    fn memory_buffer(&mut self) -> Option<OwnedFd> {
        self.buffer.take()
    }
}

impl ControllerParts<'_> {
    /// A controller that ends with this process.
    ///
    /// # Errors
    /// It cannot be made like this.
    pub fn controller(self) -> Result<Controller> {
        let Self {
            id,
            config,
            namespaces,
            io,
            page,
        } = self;
        Ok(Controller::with_page(id, config, namespaces, io, page)?)
    }

    /// Makes a controller that survives its process. It continues from the previous process's
    /// state, if that is possible. `memories` gets the guest memory that it has.
    ///
    /// # Errors
    /// The controller cannot be made with this configuration.
    pub fn survive(
        mut self,
        mut survival: Survival,
        memories: &mut MemoryCache,
        listener: &Listener,
    ) -> Result<(Controller, Option<Survival>)> {
        if let Some(left) = survival.left.take() {
            match self.restore(&survival, &left, memories) {
                Ok(controller) => {
                    survival.left = Some(left);
                    return Ok((controller, Some(survival)));
                }
                Err(error) => {
                    self.page = DoorbellPage::new()?;
                    let first = InitialDescriptors {
                        page: Some(self.page.as_fd()),
                        listener,
                        client: None,
                    };
                    match survival.renew(left, first, &error.to_string()) {
                        Ok(renewed) => survival = renewed,
                        Err(error) => {
                            let error = format_args!("{error:#}");
                            tracing::error!(error, "this disk will not outlive its process");
                            return Ok((self.controller()?, None));
                        }
                    }
                }
            }
        }
        let state = survival.state.clone();
        let Self {
            id,
            config,
            namespaces,
            io,
            page,
        } = self;
        let controller = Controller::with_state(id, config, namespaces, io, page, state)?;
        Ok((controller, Some(survival)))
    }

    fn restore(
        &self,
        survival: &Survival,
        left: &PreviousDisk,
        memories: &mut MemoryCache,
    ) -> Result<Controller, controller::RestoreError> {
        let mut found = ClientResources {
            fds: &left.fds,
            memories,
            buffer: left.memory_buffer(),
        };
        let (controller, recovery) = Controller::restore(
            self.id,
            self.config.clone(),
            self.namespaces.clone(),
            self.io,
            self.page.clone(),
            survival.state.clone(),
            &mut found,
        )?;
        tracing::info!(
            replayed = recovery.replayed,
            ended = recovery.ended,
            posted = recovery.posted,
            "the disk goes on where the previous process has left it"
        );
        Ok(controller)
    }
}
