#!/usr/bin/env bash
# From nothing to a trained model on this machine's CPU: a corpus, a vocabulary, a dataset, a small GPT on 8 processes
# (tensor 2 x pipeline 2 x data 2), a checkpoint, a resume from it, and a sample of what the model writes.
#
#   bash examples/quickstart.sh [--short] [--folder DIR]
#
#   --short         a few iterations, to see that everything works
#   --folder DIR    where to put everything (./quickstart-data)
#
# The corpus is the source of this Python's standard library, so nothing is downloaded but the requirements, once, into .venv
# (tools/setup_env.sh says how to choose the Python or to use the environment that is active).
set -euo pipefail

folder=quickstart-data iterations=150 more=20 log_interval=10
while (($#)); do
    case $1 in
        --short) iterations=12 more=4 log_interval=2 ;;
        --folder) folder=${2:?--folder needs a folder} && shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) echo "quickstart.sh: unknown argument $1 (--short, --folder DIR, --help)" >&2 && exit 2 ;;
    esac
    shift
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$root"

say() { printf '\n== %s\n' "$1"; }

corpus=$folder/corpus.jsonl vocabulary=$folder/vocabulary.model dataset=$folder/stdlib_text_document run=$folder/run
if [[ -f $corpus ]]; then
    say "Corpus: $corpus is there already"
else
    say "Corpus: the source of Python's standard library, one file a document"
    python examples/make_corpus.py --output "$corpus"
fi
if [[ -f $vocabulary ]]; then
    say "Vocabulary: $vocabulary is there already"
else
    say "Vocabulary: 4,096 sentencepiece tokens"
    python tools/train_tokenizer.py --input "$corpus" --output "$vocabulary" --kind sentencepiece-bpe --vocab-size 4096 \
        --max-bytes 4000000
fi
if [[ -f $dataset.bin && -f $dataset.idx ]]; then
    say "Dataset: $dataset.bin and .idx are there already"
else
    say "Dataset: the corpus as tokens, in a file of tokens (.bin) and an index (.idx)"
    python tools/preprocess_data.py --input "$corpus" --output-prefix "${dataset%_text_document}" --append-eod --workers 2 \
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$vocabulary"
fi
if [[ -e $run/made-by-quickstart ]]; then
    say "Starting afresh: removing the run of an earlier call, $run"
    rm -r "$run"
fi
mkdir "$run" || exit 1 # what is there and not ours stays
touch "$run/made-by-quickstart"

export OMP_NUM_THREADS=1 # 8 processes share the cores of one machine
launch=(python -m torch.distributed.run --standalone --nproc-per-node 8 pretrain_gpt.py)
model=(--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.06)
data=(--data-path "$dataset" --split 95,5,0 --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$vocabulary")
layout=(--device cpu --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel)
# The learning rate falls over both runs together, so it is told the length of both.
optimizer=(--lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters $((iterations + more)) --adam-beta2 0.95)
training=(--micro-batch-size 2 --global-batch-size 8 --eval-interval "$iterations" --eval-iters 8
    --log-interval "$log_interval" --metrics-file "$run/metrics.jsonl" --save "$run/checkpoints")

say "Training: $iterations iterations on 8 processes, tensor 2 x pipeline 2 x data 2"
"${launch[@]}" "${model[@]}" "${data[@]}" "${layout[@]}" "${optimizer[@]}" "${training[@]}" --train-iters "$iterations"

say "Resuming from the checkpoint for $more iterations more"
"${launch[@]}" "${model[@]}" "${data[@]}" "${layout[@]}" "${optimizer[@]}" "${training[@]}" --train-iters $((iterations + more)) \
    --load "$run/checkpoints" --exit-on-missing-checkpoint

say "Sample: the model goes on with a line of Python"
python tools/generate_text.py --load "$run/checkpoints" --device cpu --prompt 'def read(self,' --max-new-tokens 60 --temperature 0.7 |
    tee "$run/sample.txt"

say "Done"
python examples/summarise_run.py --metrics "$run/metrics.jsonl"
echo "Everything is in $folder: the numbers in run/metrics.jsonl, the checkpoints in run/checkpoints, the sample in run/sample.txt."
