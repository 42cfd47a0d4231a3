// Measures llama.cpp on one thread through node-llama-cpp; started by bench/llama_cpp.py.
// Arguments: one JSON object {model, streams, context, prompt, steps, rounds}. Prints one JSON object of CPU seconds
// of the whole process: {decode: {streams: [per step, one a round]}, prefill: [one a round]}.
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const options = JSON.parse(process.argv[2]);
const llama = await getLlama({build: "never", gpu: false, maxThreads: 1, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: options.model});
const vocabSize = model.fileInfo.metadata.tokenizer.ggml.tokens.length;
const tokens = (seed, number) => Array.from({length: number}, (_, index) => (7919 * index + 13 * seed) % vocabSize);
const cpuSeconds = () => {
    const {user, system} = process.cpuUsage();
    return (user + system) / 1e6;
};
const evaluateOptions = {temperature: 0, yieldEogToken: true};

async function decode(streams) {
    const context = await model.createContext({
        sequences: streams, contextSize: 2 * options.context, batchSize: 512, threads: 1, flashAttention: true
    });
    const prompt = options.context - options.steps * options.rounds / 2;
    const running = [];
    for (let index = 0; index < streams; index++) {
        const iterator = context.getSequence().evaluate(tokens(index, prompt), evaluateOptions);
        await iterator.next();
        running.push(iterator);
    }
    const step = async () => {
        const results = await Promise.all(running.map((iterator) => iterator.next()));
        if (results.some((result) => result.done))
            throw new Error("a stream ended early");
    };
    await step();
    const rounds = [];
    for (let round = 0; round < options.rounds; round++) {
        const started = cpuSeconds();
        for (let index = 0; index < options.steps; index++)
            await step();
        rounds.push((cpuSeconds() - started) / options.steps);
    }
    await Promise.all(running.map((iterator) => iterator.return()));
    await context.dispose();
    return rounds;
}

async function prefill() {
    const rounds = [];
    const context = await model.createContext({
        sequences: 1, contextSize: 2 * options.prompt, batchSize: 512, threads: 1, flashAttention: true
    });
    for (let round = 0; round < options.rounds + 1; round++) {
        const sequence = context.getSequence();
        const started = cpuSeconds();
        const iterator = sequence.evaluate(tokens(round, options.prompt), evaluateOptions);
        await iterator.next();
        rounds.push(cpuSeconds() - started);
        await iterator.return();
        await sequence.clearHistory();
        sequence.dispose();
    }
    await context.dispose();
    return rounds.slice(1);  // the first pays for first touches
}

const result = {decode: {}, prefill: await prefill()};
for (const streams of options.streams)
    result.decode[streams] = await decode(streams);
console.log(JSON.stringify(result));
process.exit(0);
