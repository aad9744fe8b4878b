//! Options of the benchmarks' programs: `OUTPUT [--runtime SECONDS] [--runs N]`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

/// Options of a benchmark: measurement and output.
#[derive(Debug)]
pub struct BenchOptions {
    /// The file for the figures, in the form of `results.json`.
    pub output: PathBuf,
    /// Duration of one run of one case, in seconds; at least 1.
    pub runtime: u32,
    /// Runs of each case; at least 1.
    pub runs: u32,
}

impl BenchOptions {
    /// Reads the words after the program's name. The defaults are three runs, of `runtime` seconds.
    ///
    /// # Errors
    /// Words that it does not understand; the message shows the usage of `program`.
    pub fn parse(
        program: &str,
        runtime: u32,
        words: impl IntoIterator<Item = String>,
    ) -> Result<Self> {
        let usage = format!("usage: {program} OUTPUT [--runtime SECONDS] [--runs N]");
        let mut options = BenchOptions {
            output: PathBuf::new(),
            runtime,
            runs: 3,
        };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut number = || -> Result<u32> {
                let value = words.next();
                let value = value.with_context(|| format!("{word} wants a number"))?;
                let number: u32 = value.parse().with_context(|| format!("{word} {value}"))?;
                Ok(number.max(1))
            };
            match word.as_str() {
                "--runtime" => options.runtime = number()?,
                "--runs" => options.runs = number()?,
                _ if word.starts_with('-') || !options.output.as_os_str().is_empty() => {
                    bail!("{word}: {usage}")
                }
                _ => options.output = word.into(),
            }
        }
        ensure!(!options.output.as_os_str().is_empty(), "{usage}");
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<BenchOptions> {
        BenchOptions::parse("bench", 2, words.split_whitespace().map(String::from))
    }

    #[test]
    fn arguments_become_options() {
        let options = parse("out.json --runs 5").unwrap();
        assert_eq!(options.output, PathBuf::from("out.json"));
        assert_eq!((options.runtime, options.runs), (2, 5));
        assert_eq!(parse("--runtime 0 out.json").unwrap().runtime, 1);
    }

    #[test]
    fn unknown_arguments_are_refused_with_usage() {
        for words in ["", "--rums 5 out.json", "out.json more"] {
            let error = parse(words).unwrap_err().to_string();
            assert!(error.contains("usage: bench OUTPUT"), "{words:?}: {error}");
        }
        assert!(parse("out.json --runs many").is_err());
        assert!(parse("out.json --runs").is_err());
    }
}
