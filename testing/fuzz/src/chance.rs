//! Inputs by chance, the same in every run, for the targets' own tests.

/// Marsaglia's xorshift64.
pub struct Chance(u64);

impl Chance {
    pub fn new() -> Self {
        Chance(0x9e37_79b9_7f4a_7c15)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// An input of so many bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| (self.next() >> 24) as u8).collect()
    }

    /// Makes an input of fewer than `below` bytes. Its first byte selects the setup of a target;
    /// `setup` changes most values with which little would happen.
    pub fn script(&mut self, below: usize, setup: impl Fn(&mut u8)) -> Vec<u8> {
        let length = self.next() as usize % below;
        let mut data = self.bytes(length);
        if let Some(first) = data.first_mut()
            && !self.next().is_multiple_of(8)
        {
            setup(first);
        }
        data
    }
}

/// Runs a target on 20,000 inputs: files of the corpus `name` with up to three changed bytes.
#[cfg(test)]
pub fn run_mutated(name: &str, target: fn(&[u8])) {
    let corpus = format!("{}/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(corpus).unwrap();
    let seeds: Vec<Vec<u8>> = entries
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    let mut chance = Chance::new();
    let mut below = |bound: usize| chance.next() as usize % bound;
    for _ in 0..20_000 {
        let mut input = seeds[below(seeds.len())].clone();
        for _ in 0..=below(3) {
            let at = below(input.len());
            input[at] = below(256) as u8;
        }
        target(&input);
    }
}
