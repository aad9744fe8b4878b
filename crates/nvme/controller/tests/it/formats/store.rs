//! A format store that outlives the controller, and answers when the test wants.
#![allow(dead_code)] // Not every test uses all of it.

use controller::SavedFormat;
use controller::{BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, MetadataState};
use dma::SharedPages;
use protection::table::{self, Identity};
use std::fs::File;
use std::sync::{Arc, Mutex};
use volume::Volume;

/// See the module.
#[derive(Default)]
pub struct TestStore(Mutex<State>);

struct State {
    kept: BlockFormat,
    /// Bytes of the volume.
    size: u64,
    /// The file of the metadata of the format that is kept, if it has any.
    pages: Option<SharedPages>,
    /// What makes it durable: it is a file that others can make shorter.
    volume: Option<Arc<dyn Volume>>,
    file: Option<File>,
    saves: Vec<BlockFormat>,
    holds: bool,
    fails: bool,
    loses: bool,
    held: Vec<(SavedFormat, FormatSaved)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            kept: BlockFormat::plain(512),
            size: 0,
            pages: None,
            volume: None,
            file: None,
            saves: Vec::new(),
            holds: false,
            fails: false,
            loses: false,
            held: Vec::new(),
        }
    }
}

impl State {
    fn identity(&self) -> Identity {
        Identity {
            namespace: [1; 16],
            blocks: self.size / u64::from(self.kept.block),
        }
    }

    /// The file is made anew.
    fn remake(&mut self) {
        let (identity, layout) = (self.identity(), self.kept.layout());
        self.pages = layout.map(|layout| {
            let size = table::len(identity.blocks, layout.metadata).unwrap();
            let pages = match self.volume {
                Some(_) => {
                    let file = tempfile::tempfile().unwrap();
                    file.set_len(size).unwrap();
                    self.file = Some(file.try_clone().unwrap());
                    SharedPages::of_file(file.into()).unwrap()
                }
                None => SharedPages::new(size as usize).unwrap(),
            };
            let header = table::encode(&layout, identity);
            pages.memory().write(0, &header).unwrap();
            pages
        });
    }

    /// The metadata as the file has it.
    fn metadata(&self) -> Option<Arc<MetadataState>> {
        let (layout, pages) = (self.kept.layout()?, self.pages.clone()?);
        let mut bytes = vec![0; table::HEADER];
        pages.memory().read(0, &mut bytes).unwrap();
        let identity = self.identity();
        let size = table::len(identity.blocks, layout.metadata).unwrap();
        let generation = table::decode(&bytes, size, &layout, identity).unwrap();
        let volume = self.volume.clone();
        let made = MetadataState::new(layout, identity.blocks, generation, pages, volume);
        Some(Arc::new(made.unwrap()))
    }
}

impl std::fmt::Debug for TestStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestStore").finish_non_exhaustive()
    }
}

impl TestStore {
    pub fn new(kept: u32) -> Arc<Self> {
        Self::of(BlockFormat::plain(kept), 0)
    }

    /// Of a namespace of so many bytes that has this format.
    pub fn of(kept: BlockFormat, size: u64) -> Arc<Self> {
        Self::flushed(kept, size, None)
    }

    /// The same with metadata that this volume makes durable.
    pub fn flushed(kept: BlockFormat, size: u64, volume: Option<Arc<dyn Volume>>) -> Arc<Self> {
        let mut state = State {
            kept,
            size,
            volume,
            ..State::default()
        };
        state.remake();
        Arc::new(Self(Mutex::new(state)))
    }

    pub fn formats(self: &Arc<Self>, first: u32) -> Formats {
        Formats::new(first, self.clone())
    }

    /// What the next process finds: bytes of a block.
    pub fn kept(&self) -> u32 {
        self.format().block
    }

    /// Others make the file of the metadata shorter, which has a volume.
    pub fn cut(&self) {
        let state = self.0.lock().unwrap();
        state.file.as_ref().unwrap().set_len(0).unwrap();
    }

    pub fn volume(&self) -> Option<Arc<dyn Volume>> {
        self.0.lock().unwrap().volume.clone()
    }

    /// The same, all of it.
    pub fn format(&self) -> BlockFormat {
        self.0.lock().unwrap().kept
    }

    /// The metadata that the next process finds.
    pub fn metadata(&self) -> Option<Arc<MetadataState>> {
        self.0.lock().unwrap().metadata()
    }

    /// Bytes of blocks of all that it was asked to keep.
    pub fn saves(&self) -> Vec<u32> {
        let state = self.0.lock().unwrap();
        state.saves.iter().map(|format| format.block).collect()
    }

    /// It keeps what it is asked to, and does not say so before [`TestStore::release`].
    pub fn hold(&self) {
        self.0.lock().unwrap().holds = true;
    }

    pub fn release(&self) {
        let mut state = self.0.lock().unwrap();
        state.holds = false;
        let held = std::mem::take(&mut state.held);
        drop(state);
        for (kept, done) in held {
            done(kept);
        }
    }

    /// It keeps nothing new.
    pub fn fail(&self, fails: bool) {
        self.0.lock().unwrap().fails = fails;
    }

    /// Whether it keeps anything or not, it says that it does not know.
    pub fn lose(&self, loses: bool) {
        self.0.lock().unwrap().loses = loses;
    }
}

impl FormatStore for TestStore {
    fn save(&self, format: BlockFormat, done: FormatSaved) {
        let mut state = self.0.lock().unwrap();
        state.saves.push(format);
        if !state.fails {
            state.kept = format;
            state.remake();
        }
        let kept = match (state.fails, state.loses) {
            (_, true) => SavedFormat::Unknown,
            (true, false) => SavedFormat::Before,
            (false, false) => SavedFormat::New(KeptFormat {
                metadata: state.metadata(),
            }),
        };
        if state.holds {
            return state.held.push((kept, done));
        }
        drop(state);
        done(kept);
    }
}
